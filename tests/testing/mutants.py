"""Compressors with planted bugs: each differs from its base class in one way that a property must find."""

from itertools import count

import torch
import torch.distributed as dist

from tests.testing.compressors import Compressor, Int8, Quantizer, RandomK, TopK

# Errors.


class ErrorTimes999(TopK):
    def total(self, gradient, error):
        return gradient + 0.999 * error


class Int8ErrorTimes999(Int8):
    """The loss in a step is a few millionths of the gradient."""

    def total(self, gradient, error):
        return gradient + 0.999 * error


class Int8ErrorsIn16Bits(Int8):
    """The rounding errors of an error are lost."""

    def sound(self, error):
        return super().sound(error).bfloat16()


class ErrorOfTheGradient(TopK):
    """The error doesn't include the last step's error."""

    def error(self, gradient, total, output, sent):
        return gradient - sent


class ErrorOfTheAverage(TopK):
    """The error is this rank's total minus the average, so it includes the other ranks' noise."""

    def error(self, gradient, total, output, sent):
        return total - output


class ErrorNotSaved(TopK):
    def __getstate__(self):
        return super().__getstate__() | {"errors": {}}


class ErrorKeptNan(TopK):
    def sound(self, error):
        return error


class SharedErrors(TopK):
    """All tensors of one shape, also in different buckets, have one error."""

    def key(self, bucket, position):
        return tuple(bucket.gradients()[position].shape)


class ErrorsByPosition(TopK):
    """Errors are found by a tensor's position in the buckets, although DDP rearranges buckets once."""

    def key(self, bucket, position):
        return bucket.index(), position, tuple(bucket.gradients()[position].shape)


class Hoarder(TopK):
    """The errors of all steps are kept."""

    def error(self, gradient, total, output, sent):
        self.errors[self.step, gradient] = error = super().error(gradient, total, output, sent)
        return error.clone()


# Sums and ranks.


class OwnFirst(TopK):
    """Every rank adds its own values first, so the order of addition differs between ranks."""

    def gathered(self, *tensors):
        received, rank = super().gathered(*tensors), self.process_group.rank()
        return [received[rank], *received[:rank], *received[rank + 1 :]]


class OwnIndices(RandomK):
    """The indices are drawn from torch's own generator, which differs between ranks."""

    def permutation(self, numel):
        return torch.randperm(numel)


class FirstRanksIndices(TopK):
    """All ranks send the elements that are largest on rank 0."""

    def indices(self, total):
        indices = super().indices(total)
        dist.broadcast(indices, 0, group=self.process_group)
        return indices


class SwallowedNan(TopK):
    """Rank 1 makes its gradients finite."""

    def total(self, gradient, error):
        return super().total(
            gradient.nan_to_num(0, 0, 0) if self.process_group.rank() == 1 else gradient, error
        )


# Other claims.


class Threshold(TopK):
    """Elements smaller than 1e-3 are set to zero, whatever the scale of the gradient."""

    def total(self, gradient, error):
        total = super().total(gradient, error)
        return torch.where(total.abs() < 1e-3, 0, total)


class Unseeded(RandomK):
    """The seed continues from the process's last run."""

    calls = count()

    def permutation(self, numel):
        return torch.randperm(numel, generator=torch.Generator().manual_seed(next(self.calls)))


class RoundedTwice(Quantizer):
    """Values are rounded to nearest after adding the noise for rounding down: a bias of half a level."""

    def rounded(self, values):
        return (values + torch.rand(values.shape)).round()


class WholeBucket(TopK):
    """The largest quarter of the bucket is sent, so a tensor's output depends on the other tensors in it."""

    def parts(self, bucket):
        return [bucket.buffer()]


class DividedInASideCallback(Compressor):
    """A rank that waits for the returned future may go on before the sum is divided."""

    def start(self, bucket):
        buffer, size = bucket.buffer(), self.process_group.size()
        summed = dist.all_reduce(buffer, group=self.process_group, async_op=True).get_future()
        summed.then(lambda _: buffer.div_(size))
        return summed


class FromCallbacks(Compressor):
    """The largest value of all ranks is reduced first; that collective's callback issues the average."""

    def start(self, bucket):
        buffer = bucket.buffer()
        work = dist.all_reduce(
            buffer.abs().amax(), dist.ReduceOp.MAX, group=self.process_group, async_op=True
        )
        return work.get_future().then(lambda _: self.mean(buffer))
