"""Compressors with planted bugs: each differs from its base class in one thing, which a property has to find."""

from itertools import count

import torch
import torch.distributed as dist

from tests.testing.compressors import Compressor, Int8, Quantiser, RandomK, TopK

# Errors.


class ErrorDropped(TopK):
    def error(self, gradient, total, output, sent):
        return torch.zeros_like(gradient)


class ErrorTwice(TopK):
    def total(self, gradient, error):
        return gradient + 2 * error


class ErrorTimes999(TopK):
    def total(self, gradient, error):
        return gradient + 0.999 * error


class Int8WithoutErrors(Int8):
    """Keeps what was left out, and never adds it."""

    def total(self, gradient, error):
        return gradient.clone()


class Int8HalfTheError(Int8):
    def total(self, gradient, error):
        return gradient + error / 2


class Int8ErrorSubtracted(Int8):
    def total(self, gradient, error):
        return gradient - error


class Int8ErrorTimes999(Int8):
    """What is lost in a step is a few millionths of the gradient."""

    def total(self, gradient, error):
        return gradient + 0.999 * error


class Int8ErrorsIn16Bits(Int8):
    """What is rounded off an error is lost."""

    def sound(self, error):
        return super().sound(error).bfloat16()


class Int8ErrorForgotten(Int8):
    """Every few steps."""

    def total(self, gradient, error):
        return super().total(gradient, torch.zeros_like(error) if self.step % 5 == 4 else error)


class ErrorOfTheGradient(TopK):
    """Without what was left out before."""

    def error(self, gradient, total, output, sent):
        return gradient - sent


class ErrorOfTheAverage(TopK):
    """What all ranks together left out of this rank's: the others' noise comes in."""

    def error(self, gradient, total, output, sent):
        return total - output


class ErrorNotSaved(TopK):
    def __getstate__(self):
        return super().__getstate__() | {"errors": {}}


class ErrorKeptNan(TopK):
    def sound(self, error):
        return error


class SharedErrors(TopK):
    """Tensors of one shape, also in other buckets, have one error."""

    def key(self, bucket, place):
        return tuple(bucket.gradients()[place].shape)


class ErrorsByPlace(TopK):
    """Where a tensor lies in the buckets tells whose the error is; but DDP rearranges them once."""

    def key(self, bucket, place):
        return bucket.index(), place, tuple(bucket.gradients()[place].shape)


class Hoarder(TopK):
    """Keeps the errors of all steps."""

    def error(self, gradient, total, output, sent):
        self.errors[self.step, gradient] = error = super().error(gradient, total, output, sent)
        return error.clone()


# Sums and ranks.


class SumForMean(Quantiser):
    def mean(self, tensor):
        dist.all_reduce(tensor, group=self.process_group)
        return tensor


class OwnFirst(TopK):
    """Every rank adds what the others sent to its own: in another order on each."""

    def gathered(self, *tensors):
        received, rank = super().gathered(*tensors), self.process_group.rank()
        return [received[rank], *received[:rank], *received[rank + 1 :]]


class OwnPlaces(RandomK):
    """Drawn from torch's own generator, which differs between ranks."""

    def permutation(self, numel):
        return torch.randperm(numel)


class FirstRanksPlaces(TopK):
    """All send what is largest on rank 0."""

    def places(self, total):
        places = super().places(total)
        dist.broadcast(places, 0, group=self.process_group)
        return places


class SwallowedNan(TopK):
    """Rank 1 makes its gradients finite."""

    def total(self, gradient, error):
        return super().total(
            gradient.nan_to_num(0, 0, 0) if self.process_group.rank() == 1 else gradient, error
        )


# Other promises.


class Threshold(TopK):
    """What is smaller than 1e-3 counts as nothing, whatever the rest."""

    def total(self, gradient, error):
        total = super().total(gradient, error)
        return torch.where(total.abs() < 1e-3, 0, total)


class Unseeded(RandomK):
    """Goes on where the process's last run ended."""

    calls = count()

    def permutation(self, numel):
        return torch.randperm(numel, generator=torch.Generator().manual_seed(next(self.calls)))


class RoundedTwice(Quantiser):
    """To the nearest level, after the noise that makes up for rounding down: biased by half a level."""

    def rounded(self, values):
        return (values + torch.rand(values.shape)).round()


class WholeBucket(TopK):
    """The largest quarter of the bucket: what is sent of a tensor depends on what else is in it."""

    def parts(self, bucket):
        return [bucket.buffer()]


class FromCallbacks(Compressor):
    """Finds the largest value of all ranks; from that collective's callback, averages."""

    def start(self, bucket):
        buffer = bucket.buffer()
        work = dist.all_reduce(
            buffer.abs().amax(), dist.ReduceOp.MAX, group=self.process_group, async_op=True
        )
        return work.get_future().then(lambda _: self.mean(buffer))
