"""What gradcomp.testing has to tell apart: compressors as users write them, ours, and both with planted bugs.

A compressor is the state of `hook`. A mutant of it differs from its base class in one thing.
"""

from itertools import count

import torch
import torch.distributed as dist


def hook(state, bucket):
    """Average the bucket through its compressor."""
    return state.start(bucket)


class Compressor:
    """Tensor by tensor, with error feedback: `compress` gradient + error, and keep what it left out."""

    def __init__(self, process_group):
        self.process_group = process_group
        self.step = 0
        self.errors = {}

    def start(self, bucket):
        for place, gradient in enumerate(self.parts(bucket)):
            key = self.key(bucket, place)
            total = self.total(gradient, self.errors.get(key, torch.zeros_like(gradient)))
            output, sent = self.compress(total.flatten())
            error = self.error(gradient, total, output.view_as(total), sent.view_as(total))
            self.errors[key] = self.sound(error)
            gradient.copy_(output.view_as(total))
        self.step += bucket.is_last()
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    def parts(self, bucket):
        return bucket.gradients()

    def key(self, bucket, place):
        return id(bucket.parameters()[place])

    def total(self, gradient, error):
        return gradient + error

    def error(self, gradient, total, output, sent):
        return total - sent

    def sound(self, error):
        """A bad step is forgotten."""
        return error.nan_to_num(0, 0, 0)

    def mean(self, tensor):
        dist.all_reduce(tensor.div_(self.process_group.size()), group=self.process_group)
        return tensor

    def __getstate__(self):
        return vars(self) | {"process_group": None}


class TopK(Compressor):
    """The largest quarter of what each rank has, with their places."""

    def compress(self, total):
        places = self.places(total)
        output, sent = torch.zeros_like(total), torch.zeros_like(total)
        sent[places] = total[places]
        for their_places, values in self.gathered(places, total[places]):
            output[their_places] += values / self.process_group.size()
        return output, sent

    def places(self, total):
        return total.abs().topk(-(-total.numel() // 4)).indices

    def gathered(self, *tensors):
        """Every rank's, in the order of the ranks."""
        received = []
        for tensor in tensors:
            received.append([torch.empty_like(tensor) for _ in range(self.process_group.size())])
            dist.all_gather(received[-1], tensor, group=self.process_group)
        return list(zip(*received, strict=True))


class RandomK(Compressor):
    """A random half, the same on every rank."""

    def compress(self, total):
        total = total + 0 * total.abs().amax()  # NaN all over, where a rank might not send it
        places = self.permutation(total.numel())[: -(-total.numel() // 2)]
        output, sent = torch.zeros_like(total), torch.zeros_like(total)
        sent[places] = total[places]
        output[places] = self.mean(total[places])
        return output, sent

    def permutation(self, numel):
        return torch.randperm(numel, generator=torch.Generator().manual_seed(self.step))


class Quantiser(Compressor):
    """127 levels up to a tensor's largest value, rounded up or down at random: unbiased."""

    def compress(self, total):
        level = total.abs().amax() / 127 if total.numel() else total.sum()
        return self.mean(torch.where(level == 0, total, self.rounded(total / level) * level)), total

    def rounded(self, values):
        return (values + torch.rand(values.shape)).floor()


class Int8(Compressor):
    """127 levels on either side of zero, up to a tensor's largest value; to the nearest one."""

    def compress(self, total):
        level = total.abs().amax() / 127 if total.numel() else total.sum()
        sent = torch.where(level == 0, total, (total / level).round() * level)
        return self.mean(sent.clone()), sent


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
