"""Small hooks that average exactly, wrongly or approximately."""

import torch
import torch.distributed as dist


def done(value):
    future = torch.futures.Future()
    future.set_result(value)
    return future


def scaled_mean(factor):
    def hook(state, bucket):
        dist.all_reduce(bucket.buffer().mul_(factor / dist.get_world_size()))
        return done(bucket.buffer())

    return hook


def first_element_lost(state, bucket):
    average = scaled_mean(1.0)(state, bucket).value()
    average[0] = 0
    return done(average)


def eight_bits(state, bucket):
    buffer = bucket.buffer()
    level = buffer.abs().max() / 127
    buffer.copy_(torch.where(level == 0, buffer, (buffer / level).round() * level))
    return scaled_mean(1.0)(state, bucket)
