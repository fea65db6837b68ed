"""Right hooks of nineteen kinds. `hook` of tests.testing.compressors runs all but PowerSGD's."""

from functools import partial

import torch
import torch.distributed as dist

from gradcomp.hooks import powerSGD_hook as powerSGD
from tests.testing.compressors import Average, Compressor, OwnRandomK, RandomK, TopK, UnbiasedRandomK, hook


class Keyed(Compressor):
    """A compressor with further tensors per parameter: `kept`, under the key of the current one."""

    def __init__(self, process_group):
        super().__init__(process_group)
        self.kept = {}

    def key(self, bucket, position):
        self.current = super().key(bucket, position)
        return self.current


class StaleThreshold(Keyed):
    """Elements above a threshold are sent, half of all at most. The threshold is renewed every 4th step."""

    reuse = 4

    def compress(self, total):
        numel = total.numel()
        if not numel:
            return total, total
        total = total + 0 * total.abs().amax()
        k = -(-numel // 4)
        if self.step % self.reuse == 0 or self.current not in self.kept:
            self.kept[self.current] = total.abs().topk(k).values[-1].nan_to_num(0, 0, 0).item()
        chosen = ~(total.abs() < self.kept[self.current])
        chosen[total.abs().argmax()] = True
        indices = chosen.nonzero().flatten()
        indices = indices[total[indices].abs().topk(min(len(indices), 2 * k)).indices]
        sent = torch.zeros_like(total)
        sent[indices] = total[indices]
        return self.gathered_sum(total, indices), sent

    def gathered_sum(self, total, indices):
        """Gather values and their indices, padded to the largest number on any rank."""
        size = self.process_group.size()
        largest = torch.tensor([len(indices)])
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.process_group)
        padded, values = torch.zeros(int(largest), dtype=torch.long), total.new_zeros(int(largest))
        padded[: len(indices)], values[: len(indices)] = indices, total[indices] / size
        output = torch.zeros_like(total)
        for theirs, sent in TopK.gathered(self, padded, values):
            self.add(output, theirs, sent)
        return output

    def add(self, output, indices, values):
        output.index_add_(0, indices, values)


class TwoWayInt8(Keyed):
    """Every rank rounds with feedback. The owner of a shard rounds the sum again, with its own feedback."""

    def compress(self, total):
        sent = self.rounded(total)
        return self.owned(self.mean(sent.clone())), sent

    def rounded(self, values):
        level = values.abs().amax() / 127 if values.numel() else values.sum()
        return torch.where(level == 0, values, (values / level).round() * level)

    def owned(self, mean):
        size, rank, numel = self.process_group.size(), self.process_group.rank(), mean.numel()
        mine = mean.new_zeros(size, -(-numel // size))
        mine.view(-1)[:numel] = mean
        total = mine[rank] + self.kept.get(self.current, 0)
        rounded = self.rounded(total)
        self.kept[self.current] = self.sound(total - rounded)
        shards = [torch.empty_like(rounded) for _ in range(size)]
        dist.all_gather(shards, rounded, group=self.process_group)
        return torch.cat(shards)[:numel]


class FeedbackOnTheOwner(TwoWayInt8):
    """The ranks round at random and keep nothing."""

    def compress(self, total):
        level = total.abs().amax() / 127 if total.numel() else total.sum()
        rounded = (total / level + torch.rand(total.shape)).floor() * level
        return self.owned(self.mean(torch.where(level == 0, total, rounded))), total

    def total(self, gradient, error):
        return gradient.clone()


class ImportanceSampling(Average):
    """An element is kept with a probability that grows with its size, and divided by it."""

    def average(self, bucket):
        for gradient in bucket.gradients():
            flat = gradient.view(-1)
            p = (flat.abs() / flat.abs().sum() * flat.numel() / 2).clamp(max=1)
            kept = (torch.rand(flat.shape) < p) | ~p.isfinite()
            flat.copy_(torch.where(kept & (flat != 0), flat / torch.where(p == 0, 1, p), 0 * flat))
            self.mean(flat)


class ScaledSign(Compressor):
    def compress(self, total):
        sent = total.sign() * (total.abs().mean() if total.numel() else total.sum())
        return self.mean(sent.clone()), sent


class OneBit(Keyed, ScaledSign):
    """Momentum, which goes on from the output: an error takes twenty times as many steps to come out."""

    def total(self, gradient, error):
        return 0.05 * gradient + 0.95 * self.kept.get(self.current, 0) + error

    def error(self, gradient, total, output, sent):
        self.kept[self.current] = self.sound(output)
        return total - sent


class RoundRobin(Keyed):
    """Every fourth element is sent, beginning one element later in each step."""

    def compress(self, total):
        total = total + (0 * total.abs().amax() if total.numel() else 0)
        turn = self.kept[self.current] = (self.kept.get(self.current, -1) + 1) % 4
        sent = torch.zeros_like(total)
        sent[turn::4] = total[turn::4]
        return self.mean(sent.clone()), sent


class Natural(Average):
    """Values are rounded to one of the next two powers of two at random (natural compression)."""

    def average(self, bucket):
        flat = bucket.buffer()
        mantissa, exponent = torch.frexp(flat)
        up = torch.rand(flat.shape) < 2 * mantissa.abs() - 1
        rounded = torch.ldexp(mantissa.sign() / 2, exponent + up.to(exponent.dtype))
        self.mean(flat.copy_(torch.where(flat.isfinite(), rounded, flat)))


class MajoritySign(Average):
    """signSGD with majority vote: the sign of most ranks' signs. It is no average, and claims none."""

    def average(self, bucket):
        flat = bucket.buffer()
        seen = 0 * flat
        dist.all_reduce(flat.sign_(), group=self.process_group)
        dist.all_reduce(seen, group=self.process_group)
        flat.sign_().add_(seen)


class Predictor(Keyed):
    """The quarter of gradient + error that is farthest from the running mean of averages is sent."""

    weight = 0.1  # of the last average in the mean

    def compress(self, total):
        predicted = self.kept.get(self.current, torch.zeros_like(total))
        off = total - predicted + (0 * total.abs().amax() if total.numel() else 0)
        indices = TopK.indices(self, off)
        sent, output = predicted.clone(), predicted.clone()
        sent[indices] += off[indices]
        for theirs, values in TopK.gathered(self, indices, off[indices]):
            output.index_add_(0, theirs, values / self.process_group.size())
        self.kept[self.current] = self.sound((1 - self.weight) * predicted + self.weight * output)
        return output, sent


class EF21(Average):
    """The largest quarter of the difference to the last estimate is sent. The mean estimate is output."""

    def __init__(self, process_group):
        super().__init__(process_group)
        self.estimates, self.means = {}, {}

    def average(self, bucket):
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            for kept in (self.estimates, self.means):
                kept.setdefault(id(parameter), torch.zeros_like(gradient).view(-1))
            off = gradient.view(-1) - self.estimates[id(parameter)]
            indices = TopK.indices(self, off)
            self.estimates[id(parameter)][indices] += off[indices]
            for theirs, values in TopK.gathered(self, indices, off[indices]):
                self.means[id(parameter)].index_add_(0, theirs, values / self.shares())
            gradient.copy_(self.means[id(parameter)].view_as(gradient))

    def shares(self):
        return self.process_group.size()


num_steps = 0


class CountsInItsModule(RandomK):
    """The seed is a variable of this module."""

    def start(self, bucket):
        global num_steps
        num_steps += bucket.is_last()
        return super().start(bucket)

    def permutation(self, numel):
        return torch.randperm(numel, generator=torch.Generator().manual_seed(num_steps))


def power_sgd(warm_start):
    return partial(
        powerSGD.PowerSGDState, matrix_approximation_rank=2, start_powerSGD_iter=2, warm_start=warm_start
    )


# name: (hook, make_state, changes to the inferred claims)
RIGHT = {
    "stale threshold": (hook, StaleThreshold, {}),
    "two-way int8": (hook, TwoWayInt8, {}),
    "importance sampling": (hook, ImportanceSampling, {}),
    "scaled sign": (hook, ScaledSign, {}),
    "one bit": (hook, OneBit, {}),
    "round robin": (hook, RoundRobin, {}),
    "natural compression": (hook, Natural, {}),
    "majority sign": (hook, MajoritySign, {}),
    "feedback on the owner": (hook, FeedbackOnTheOwner, {"error_feedback": False}),
    "PowerSGD": (powerSGD.powerSGD_hook, power_sgd(True), {}),
    "PowerSGD, cold start": (powerSGD.powerSGD_hook, power_sgd(False), {}),
    "top k": (hook, TopK, {}),
    "random k": (hook, RandomK, {}),
    "predictor": (hook, Predictor, {}),
    "EF21": (hook, EF21, {"tracks": 1.0}),
    "module's counter": (hook, CountsInItsModule, {}),
    "average": (hook, Average, {}),
    "unbiased random k": (hook, UnbiasedRandomK, {}),
    "own random k": (hook, OwnRandomK, {}),
}
