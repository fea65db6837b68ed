"""Averages with planted bugs that show in some shapes, buckets, steps or ranks only, or in zeros."""

import torch
import torch.distributed as dist

from tests.testing.compressors import Average, Int8, OwnRandomK, TopK, UnbiasedRandomK

# In some shapes.


def transpose_squares(bucket):
    for average in bucket.gradients():
        if average.dim() == 2 and average.shape[0] == average.shape[1] >= 8:
            average.copy_(average.t().clone())


class SquaresTransposed(Average):
    def average(self, bucket):
        super().average(bucket)
        transpose_squares(bucket)


class RowOverwritten(Average):
    """In a matrix of more than 200 elements, row 1 is a copy of row 0."""

    def average(self, bucket):
        super().average(bucket)
        for average in bucket.gradients():
            if average.dim() == 2 and average.numel() > 200 and len(average) > 1:
                average[1] = average[0]


class KernelsFlipped(Average):
    def average(self, bucket):
        super().average(bucket)
        for average in bucket.gradients():
            if average.dim() == 4:
                average.copy_(average.flip(3))


class FarElementsLeftOut(Average):
    """From element 2^16 of a tensor on, every rank gets rank 0's gradient."""

    def average(self, bucket):
        of_rank_0 = bucket.buffer().clone()
        dist.broadcast(of_rank_0, 0, group=self.process_group)
        super().average(bucket)
        offset = 0
        for average in bucket.gradients():
            average.view(-1)[1 << 16 :] = of_rank_0[offset : offset + average.numel()][1 << 16 :]
            offset += average.numel()


class TopKOfSquaresTransposed(TopK):
    """The errors are right, the output isn't."""

    def start(self, bucket):
        future = super().start(bucket)
        transpose_squares(bucket)
        return future


# In some buckets.


class LastBucketSummed(Average):
    def average(self, bucket):
        super().average(bucket)
        if bucket.is_last() and bucket.index():
            bucket.buffer().mul_(self.process_group.size())


class ViewsOfTheFirstStep(Average):
    """The views of the first step's buckets are averaged, although DDP rearranges buckets once."""

    def __init__(self, process_group):
        super().__init__(process_group)
        self.views = {}

    def average(self, bucket):
        for view in self.views.setdefault(bucket.index(), bucket.gradients()):
            self.mean(view)


# In some steps.


class EveryTwentyFifthStepWithoutRank1(Average):
    def average(self, bucket):
        if self.step % 25 == 24 and self.process_group.rank() == 1:
            bucket.buffer().zero_()
        super().average(bucket)


class StaleAverages(Average):
    """The last step's average is output again in every odd step after step 20."""

    def __init__(self, process_group):
        super().__init__(process_group)
        self.last = {}

    def average(self, bucket):
        super().average(bucket)
        if self.step > 20 and self.step % 2:
            bucket.buffer().copy_(self.last[bucket.index()])
        elif self.step >= 20:
            self.last[bucket.index()] = bucket.buffer().clone()


class ErrorForgottenLate(TopK):
    """The error is dropped in every twenty-fifth step."""

    def total(self, gradient, error):
        return super().total(gradient, torch.zeros_like(error) if self.step % 25 == 24 else error)


# In size or noise.


class SumsInInt8(Int8):
    """Codes up to 15 are summed in 8 bits, which overflow from nine ranks on."""

    def compress(self, total):
        level = total.abs().amax() / 15
        dist.all_reduce(level, dist.ReduceOp.MAX, group=self.process_group)
        codes = (total / level.clamp(min=1e-30)).round().to(torch.int8)
        sent = codes * level
        dist.all_reduce(codes, group=self.process_group)
        return codes * level / self.process_group.size(), sent


class OnePercentTooLarge(Average):
    """Every element is within the tolerance of bfloat16."""

    def average(self, bucket):
        super().average(bucket)
        bucket.buffer().mul_(1.01)


class RescaledTooLittle(OwnRandomK):
    def scale(self, numel, k):
        return 0.9 * numel / k


class RescaledIn20Steps(UnbiasedRandomK):
    def scale(self, numel, k):
        return numel / k if self.step < 20 else 1.0


class OneCoin(UnbiasedRandomK):
    """All elements are sent, times 2, or none."""

    def exchange(self, flat, sent, scale):
        super().exchange(flat, range(len(flat)), 2.0 * bool(sent[0] % 2))


class MasksUsedTwice(UnbiasedRandomK):
    def seed(self, tensor):
        return self.step // 2 * 10_000 + tensor


# In zeros.


class NoLevelAtZero(Int8):
    """Values are rounded to the middles between levels, and no middle is zero. Errors make up for it."""

    def compress(self, total):
        level = total.abs().amax() / 127 if total.numel() else total.sum()
        sent = torch.where(level == 0, total, ((total / level).floor() + 0.5) * level)
        return self.mean(sent.clone()), sent


class Dithered(UnbiasedRandomK):
    """Noise is added, also to zeros. It is as often positive as negative."""

    def exchange(self, flat, sent, scale):
        super().exchange(flat, sent, scale)
        generator = torch.Generator().manual_seed(self.step)
        flat += flat.abs().amax() * 1e-3 * torch.randn(flat.shape, generator=generator)
