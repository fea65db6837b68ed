"""What hooks, the Reducer and the wrapper share: buckets, process groups, streams, agreement of ranks."""
