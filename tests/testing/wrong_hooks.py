"""Wrong hooks as inventors write them. Each fails in some worlds, sizes, dtypes, steps or gradients only.

`hook` of tests.testing.compressors runs them.
"""

import torch
import torch.distributed as dist

from gradcomp.testing import Workload
from tests.testing.compressors import RandomK, TopK
from tests.testing.right_hooks import EF21, Predictor, StaleThreshold


class TailNeverSent(RandomK):
    """The elements after the last whole block of 1,024 are never sent."""

    def permutation(self, numel):
        return super().permutation(numel if numel < 1024 else numel // 1024 * 1024)


class SixteenBitIndices(RandomK):
    def permutation(self, numel):
        return super().permutation(numel).to(torch.int16).long() % numel


class SixteenBitTopK(TopK):
    def indices(self, total):
        return super().indices(total).to(torch.int16).long() % max(1, total.numel())


class SeedsTheGlobalGenerator(RandomK):
    def permutation(self, numel):
        torch.manual_seed(self.step)
        return torch.randperm(numel)


class ErrorLostAfterWarmUp(RandomK):
    last_step = 40

    def total(self, gradient, error):
        return super().total(gradient, torch.zeros_like(error) if self.step == self.last_step else error)


class ErrorLostAfter200Steps(ErrorLostAfterWarmUp):
    last_step = 200


class ErrorTwiceUnderNoSync(TopK):
    """The error is added in every backward pass, and DDP averages after the last one only."""

    def start(self, bucket):
        for position, parameter in enumerate(bucket.parameters()):
            key = self.key(bucket, position)
            if key not in self.errors:
                parameter.register_hook(lambda gradient, key=key: gradient + self.errors.get(key, 0))
        return super().start(bucket)

    def total(self, gradient, error):
        return gradient.clone()


class SeedFromAString(RandomK):
    def permutation(self, numel):
        seed = self.step + (hash("random-k") & 0xFFFF)
        return torch.randperm(numel, generator=torch.Generator().manual_seed(seed))


class ErrorInFp32(TopK):
    def sound(self, error):
        return super().sound(error).float().to(error.dtype)


class DividedByTwo(RandomK):
    def mean(self, tensor):
        dist.all_reduce(tensor.div_(2), group=self.process_group)
        return tensor


class FifthRankSkipped(TopK):
    def gathered(self, *tensors):
        return super().gathered(*tensors)[:4]


class FourthRankSkipped(TopK):
    def gathered(self, *tensors):
        return super().gathered(*tensors)[:3]


class DefaultGroup(TopK):
    def gathered(self, *tensors):
        group, self.process_group = self.process_group, dist.group.WORLD
        received = super().gathered(*tensors)
        self.process_group = group
        return received


class PaddingErases(StaleThreshold):
    """A rank that sends fewer elements pads with (index 0, value 0), which overwrites its own element 0."""

    reuse = 1

    def add(self, output, indices, values):
        dense = torch.zeros_like(output)
        dense[indices] = values
        output += dense


class LastAveragePredicted(Predictor):
    """The error of an element that waits three steps for its turn grows by the prediction in each."""

    weight = 1.0


class ParametersChanged(TopK):
    def average(self, bucket):
        super().average(bucket)
        for parameter, average in zip(bucket.parameters(), bucket.gradients(), strict=True):
            parameter.data.sub_(average, alpha=0.1)


class OrderOfASet(TopK):
    """The order of a set of names differs between processes."""

    def average(self, bucket):
        gradients = bucket.gradients()
        for name in {str(position) for position in range(len(gradients))}:
            self.mean(gradients[int(name)])


class SentFourTimesIn16Bits(TopK):
    def gathered(self, *tensors):
        return super().gathered(*tensors) * (4 if tensors[-1].dtype == torch.bfloat16 else 1)


class FailsAlone(TopK):
    def indices(self, total):
        return super().indices(total)[: total.numel() // (self.process_group.size() - 1)]


class SummedEF21(EF21):
    def shares(self):
        return 1


class WithScratch(TopK):
    """The state has a buffer besides its errors, as many have: no contraction is inferred."""

    def __init__(self, process_group):
        super().__init__(process_group)
        self.scratch = torch.zeros(1 << 17)


class SentTwice(WithScratch):
    """What is sent goes out twice, and the error changes its sign in place of becoming zero."""

    def compress(self, total):
        output, sent = super().compress(total)
        return 2 * output, 2 * sent


class ErrorsBySize(WithScratch):
    """Tensors of one size in two buckets share an error."""

    def key(self, bucket, position):
        return bucket.gradients()[position].numel()


# A small workload for each wrong hook on which the property that must find it fails.
WRONG = {
    TailNeverSent: Workload(((2, 700),), zero_steps=119),
    SixteenBitIndices: Workload(((70_000,),), zero_steps=119),
    SixteenBitTopK: Workload(((70_000,),), zero_steps=119),
    SeedsTheGlobalGenerator: Workload(((8,),)),
    ErrorLostAfterWarmUp: Workload(((8,),), steps=42, drift=1.0, zero_steps=119),
    ErrorTwiceUnderNoSync: Workload(((1, 2),), zero_steps=95, accumulated=True),
    SeedFromAString: Workload(((64,),)),
    ErrorInFp32: Workload(((2,),), dtype=torch.float64, zero_steps=95),
    DividedByTwo: Workload(((2,),), world_size=3, zero_steps=119),
    FifthRankSkipped: Workload(((1, 24),), world_size=5, zero_steps=119),
    FourthRankSkipped: Workload(((1, 24),), world_size=4, zero_steps=119),
    DefaultGroup: Workload(((8,),), groups=2),
    PaddingErases: Workload(((1, 24),), world_size=3, steps=3, spectra=("ties",), noise=1.0, zero_steps=119),
    LastAveragePredicted: Workload(((4,),), steps=3, zero_steps=63),
    SentTwice: Workload(((4,),), zero_steps=95),
    ErrorsBySize: Workload(((8,), (8,)), ((0,), (1,)), steps=5, noise=1.0, drift=1.0, zero_steps=119),
    ParametersChanged: Workload(((2,),)),
    OrderOfASet: Workload(((4,),) * 8),
    SentFourTimesIn16Bits: Workload(((8,),), dtype=torch.bfloat16),
    FailsAlone: Workload(((2,),), world_size=1),
    ErrorLostAfter200Steps: Workload(((8,),), steps=202, drift=1.0, zero_steps=119),
    SummedEF21: Workload(((8,),)),
}
# The property that must find it, if not "held_back_comes_out".
FINDERS = {
    SeedsTheGlobalGenerator: "random_state_kept",
    SeedFromAString: "same_in_processes",
    DefaultGroup: "stays_in_its_group",
    ParametersChanged: "completes",
    OrderOfASet: "same_in_processes",
    SentFourTimesIn16Bits: "contraction",
    FailsAlone: "completes",
    SummedEF21: "tracks_the_mean",
}
