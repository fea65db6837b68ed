"""Averages and compressors as users write them. Each is the state of `hook`."""

import torch
import torch.distributed as dist

from tests.testing.averaging import done


def hook(state, bucket):
    """Average the bucket through its compressor."""
    return state.start(bucket)


class Average:
    """An average without compression; the state counts its steps."""

    def __init__(self, process_group):
        self.process_group = process_group
        self.step = 0

    def start(self, bucket):
        self.average(bucket)
        self.step += bucket.is_last()
        return done(bucket.buffer())

    def average(self, bucket):
        self.mean(bucket.buffer())

    def mean(self, tensor):
        dist.all_reduce(tensor.div_(self.process_group.size()), group=self.process_group)
        return tensor

    def __getstate__(self):
        return vars(self) | {"process_group": None}


class Compressor(Average):
    """A compressor with error feedback: it compresses gradient + error per tensor, and keeps the residual."""

    def __init__(self, process_group):
        super().__init__(process_group)
        self.errors = {}

    def average(self, bucket):
        for position, gradient in enumerate(self.parts(bucket)):
            key = self.key(bucket, position)
            total = self.total(gradient, self.errors.get(key, torch.zeros_like(gradient)))
            output, sent = self.compress(total.flatten())
            error = self.error(gradient, total, output.view_as(total), sent.view_as(total))
            self.errors[key] = self.sound(error)
            gradient.copy_(output.view_as(total))

    def parts(self, bucket):
        return bucket.gradients()

    def key(self, bucket, position):
        return id(bucket.parameters()[position])

    def total(self, gradient, error):
        return gradient + error

    def error(self, gradient, total, output, sent):
        return total - sent

    def sound(self, error):
        """Return the error to keep: zero where it isn't finite, so that a bad step is forgotten."""
        return error.nan_to_num(0, 0, 0)


class Halves(Average):
    """A compressor that sends half of gradient + error and keeps the other half, by bucket index."""

    def __init__(self, process_group):
        super().__init__(process_group)
        self.errors = {}

    def average(self, bucket):
        total = bucket.buffer() + self.errors.get(bucket.index(), 0)
        # The error has the size of `total`, and is finite even if `total` isn't.
        self.errors[bucket.index()] = self.kept(total).nan_to_num(0, 0, 0)
        self.mean(bucket.buffer().copy_(total / 2))

    def kept(self, total):
        return total / 2


class TopK(Compressor):
    """A compressor that sends the largest quarter of each rank's elements, with their indices."""

    def compress(self, total):
        indices = self.indices(total)
        output, sent = torch.zeros_like(total), torch.zeros_like(total)
        sent[indices] = total[indices]
        for their_indices, values in self.gathered(indices, total[indices]):
            output[their_indices] += values / self.process_group.size()
        return output, sent

    def indices(self, total):
        return total.abs().topk(-(-total.numel() // 4)).indices

    def gathered(self, *tensors):
        """Gather these tensors of every rank, in rank order."""
        received = []
        for tensor in tensors:
            received.append([torch.empty_like(tensor) for _ in range(self.process_group.size())])
            dist.all_gather(received[-1], tensor, group=self.process_group)
        return list(zip(*received, strict=True))


class RandomK(Compressor):
    """A compressor that sends a random half of the elements, at equal indices on every rank."""

    def compress(self, total):
        total = total + 0 * total.abs().amax()  # spreads a NaN to all elements, as it might not be sent
        indices = self.permutation(total.numel())[: -(-total.numel() // 2)]
        output, sent = torch.zeros_like(total), torch.zeros_like(total)
        sent[indices] = total[indices]
        output[indices] = self.mean(total[indices])
        return output, sent

    def permutation(self, numel):
        return torch.randperm(numel, generator=torch.Generator().manual_seed(self.step))


class Quantizer(Compressor):
    """An unbiased compressor that rounds up or down at random, to 127 levels up to the largest value."""

    def compress(self, total):
        level = total.abs().amax() / 127 if total.numel() else total.sum()
        return self.mean(torch.where(level == 0, total, self.rounded(total / level) * level)), total

    def rounded(self, values):
        return (values + torch.rand(values.shape)).floor()


class Int8(Compressor):
    """A compressor that rounds to the nearest of 127 levels on either side, up to the largest value."""

    def compress(self, total):
        level = total.abs().amax() / 127 if total.numel() else total.sum()
        sent = torch.where(level == 0, total, (total / level).round() * level)
        return self.mean(sent.clone()), sent


class UnbiasedRandomK(Average):
    """An unbiased compressor: k of a tensor's n elements are sent, times n / k, with k = n / 2 rounded up.

    The elements are random, at equal indices on every rank.
    """

    def average(self, bucket):
        for position, gradient in enumerate(bucket.gradients()):
            flat, numel = gradient.view(-1), gradient.numel()
            flat += 0 * flat.abs().amax()  # spreads a NaN to all elements, as it might not be sent
            k = -(-numel // 2)
            generator = torch.Generator().manual_seed(self.seed(bucket.index() * 100 + position))
            sent = torch.randperm(numel, generator=generator)[:k]
            self.exchange(flat, sent, self.scale(numel, k))

    def seed(self, tensor):
        return self.step * 10_000 + tensor

    def scale(self, numel, k):
        return numel / k

    def exchange(self, flat, sent, scale):
        values = self.mean(flat[sent])
        flat.zero_()
        flat[sent] = values * scale


class OwnRandomK(UnbiasedRandomK):
    """Every rank sends its own choice of elements."""

    def seed(self, tensor):
        return super().seed(tensor) * 10 + self.process_group.rank()

    def exchange(self, flat, sent, scale):
        values = flat[sent] * scale
        self.mean(flat.zero_().index_copy_(0, sent, values))
