"""The way of a bucket between ranks: process groups, streams, collectives, and the checks of them."""
