"""Train three torchft replicas, one of which dies within a hook and joins again as another process.

tests/frameworks/torchft_replicas.py ddp|local_steps|example path

Writes the results to the path. The example's are what two replicas of it print.
"""

import io
import multiprocessing
import os
import subprocess
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import torchft
from torchft.coordination import LighthouseServer
from torchft.process_group import ProcessGroupGloo

from gradcomp.frameworks.torchft import DistributedDataParallel, group_of_quorum
from gradcomp.hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from gradcomp.hooks.quantization_hooks import QuantizationState, quantization_hook
from gradcomp.local_steps import LocalSteps
from gradcomp.reducer import Reducer
from tests.training import Given

HOOKS = {
    "int4": (lambda: QuantizationState(bits=4, start_iter=2), quantization_hook),
    "PowerSGD int8": (
        lambda: PowerSGDState(None, 2, start_powerSGD_iter=2, factor_dtype=torch.int8),
        powerSGD_hook,
    ),
}
SHAPES = [(64, 64), (96, 48), (50,)]
RAISES_AT, FAILS_ALONE_AT, DIES_AT, STEPS_AFTER, TIMEOUT = 3, 4, 6, 6, timedelta(seconds=10)


def gradients(replica, step):
    generator = torch.Generator().manual_seed(100 * step + replica)
    return [torch.randn(shape, generator=generator) + 0.1 * replica for shape in SHAPES]


def new_manager(number, lighthouse, saved, load, uses_async_quorum=True):
    """Return a Manager of a replica of one rank, and its process group."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    pg = ProcessGroupGloo(timeout=TIMEOUT)
    manager = torchft.Manager(
        pg=pg,
        load_state_dict=load,
        state_dict=saved,
        min_replica_size=2,
        use_async_quorum=uses_async_quorum,
        timeout=TIMEOUT,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=f"replica_{number}",
    )
    return manager, pg, store


def end(results, found):
    """Put the result, and end this process at once."""
    buffer = io.BytesIO()
    torch.save(found, buffer)  # a queue would share the tensors' memory with this process
    results.put(buffer.getvalue())
    results.close()
    results.join_thread()
    os._exit(0)


def replica(number, hook_name, uses_async_quorum, dies, results, address):
    """Train until three replicas have committed STEPS_AFTER steps since one has joined.

    Puts its results: steps, weights, and the sums of what the hook got, gave, and still owes.
    """
    torch.set_num_threads(1)
    make_state, hook = HOOKS[hook_name]
    state, model = make_state(), Given(*SHAPES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def load(saved):
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])

    def saved():
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    manager, pg, _store = new_manager(number, address.recv(), saved, load, uses_async_quorum)
    results.put("ready")
    address.recv()
    got, given, now = ([torch.zeros(shape, dtype=torch.double) for shape in SHAPES] for _ in range(3))
    place = {id(weight): index for index, weight in enumerate(model.weights)}

    def owed():
        entries = state.state.values()
        return [
            next((each["error"] for each in entries if each.get("error", torch.empty(0)).shape == shape), 0)
            for shape in map(torch.Size, SHAPES)
        ]

    faults = {RAISES_AT: True, FAILS_ALONE_AT: number == 1}

    def happens(step, bucket):
        return manager.current_step() == step and bucket.index() == 1 and faults.pop(step, False)

    def fail(future):
        raise OSError("this rank alone has not got the average")

    def observed(state, bucket):
        if happens(RAISES_AT, bucket):
            raise OSError("no rank has averaged the second bucket")
        if dies and manager.current_step() == DIES_AT and bucket.index() == 1:
            end(results, {"got": got, "owed": owed_before})
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            now[place[id(parameter)]] = gradient.double()
        future = hook(state, bucket)
        return future.then(fail) if happens(FAILS_ALONE_AT, bucket) else future

    ddp = DistributedDataParallel(manager, pg, model, state, observed, bucket_cap_mb=0.01)
    committed, refused, since, was_pair, lost = [], [], 0, False, [0] * len(SHAPES)
    while since < STEPS_AFTER:
        manager.start_quorum()
        optimizer.zero_grad()
        step, owed_before = manager.current_step(), owed()
        ddp(gradients(number, step)).backward()
        size = group_of_quorum(manager, pg).size() if not manager.errored() else 0
        if not manager.should_commit():
            refused.append(step)
            if step != FAILS_ALONE_AT:
                continue
            lost = owed()  # the others have this rank's gradients, and commit the step; this rank heals
        else:
            committed.append(manager.current_step() - 1)  # a replica that heals has begun with an earlier one
            optimizer.step()
        for index, weight in enumerate(model.weights):
            got[index] += now[index]
            given[index] += size * weight.grad.double()
        if size == 2 and not was_pair:
            results.put("trains as a pair")
        was_pair |= size == 2
        since += (was_pair or number == 3) and size == 3
    found = {
        "number": number,
        "committed": committed,
        "refused": refused,
        "iter": state.iter,
        "weights": [weight.detach() for weight in model.weights],
        "got": got,
        "given": given,
        "owed": [*map(sum, zip(owed(), lost, strict=True))],
    }
    end(results, found)


def local_replica(number, dies, results, address):
    """Average once with a Reducer, then train by local steps, as `replica` does with DDP."""
    torch.set_num_threads(1)
    manager, pg, _store = new_manager(number, address.recv(), dict, lambda saved: None)
    results.put("ready")
    address.recv()
    manager.start_quorum()
    group = group_of_quorum(manager, pg)
    model = Given(*SHAPES)
    if number < 3:
        reducer = Reducer(model.parameters(), group)
        reducer.register_comm_hook(QuantizationState(group, bits=8, start_iter=2), quantization_hook)
        model(gradients(number, 0)).backward()
        mean = sum(gradients(each, 0)[2] for each in range(3)) / 3
        assert torch.allclose(model.weights[2].grad, mean, atol=1e-6)
        reducer.close()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    state = QuantizationState(group, bits=4, start_iter=2)
    local_steps = LocalSteps(model, every=2, hook=quantization_hook, state=state)
    since, was_pair, num_steps = 0, False, 0
    while since < STEPS_AFTER:
        num_steps += 1
        optimizer.zero_grad()
        model(gradients(number, num_steps)).backward()
        optimizer.step()
        if dies and num_steps == DIES_AT:
            end(results, {})
        try:
            local_steps.step()
        except RuntimeError as error:
            manager.report_error(error)
        if num_steps % 2:
            continue
        if manager.should_commit():
            if group.size() == 2 and not was_pair:
                results.put("trains as a pair")
            was_pair |= group.size() == 2
            since += (was_pair or number == 3) and group.size() == 3
        manager.start_quorum()
        if (now := group_of_quorum(manager, pg)) is not group:
            group = now
            local_steps.regroup(group)
    local_steps.join()
    end(
        results, {"number": number, "iter": state.iter, "weights": [*map(torch.Tensor.detach, model.weights)]}
    )


def loaded(results):
    return torch.load(io.BytesIO(results.get(timeout=60)))


def begin(pipes, lighthouse, results):
    """Have processes begin to train, all in one quorum."""
    for _, pipe in pipes:
        pipe.send(lighthouse.address())
    assert [results.get(timeout=60) for _ in pipes] == ["ready"] * len(pipes)
    for _, pipe in pipes:
        pipe.send("go")


def new_lighthouse():
    return LighthouseServer(
        bind="[::]:0", min_replicas=2, join_timeout_ms=1500, quorum_tick_ms=20, heartbeat_timeout_ms=10000
    )


def run_example():
    """Return what two replicas of docs/examples/torchft_ddp.py print."""
    lighthouse = new_lighthouse()
    environment = os.environ | {"TORCHFT_LIGHTHOUSE": lighthouse.address()}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    replicas = [
        subprocess.Popen(
            [*launcher, "docs/examples/torchft_ddp.py", str(number)],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    try:
        return [each.communicate(timeout=120)[0] for each in replicas]
    finally:
        for each in replicas:
            each.kill()
        lighthouse.shutdown()


def run(target, *arguments):
    """Run a function above on four processes. Return the results of the one that dies, and the others'."""
    context = multiprocessing.get_context("fork")
    results, pipes = context.Queue(), [context.Pipe() for _ in range(4)]
    processes = [
        context.Process(target=target, args=(number, *arguments, number == 2, results, pipe[0]))
        for number, pipe in enumerate(pipes)
    ]
    for process in processes:  # before the lighthouse, whose threads a fork would lose
        process.start()
    lighthouse = new_lighthouse()
    try:
        begin(pipes[:3], lighthouse, results)
        died = loaded(results)
        assert [results.get(timeout=60) for _ in range(2)] == ["trains as a pair"] * 2
        begin(pipes[3:], lighthouse, results)
        others = [loaded(results) for _ in range(3)]
    finally:
        for process in processes:
            process.kill()
            process.join()
        lighthouse.shutdown()
    return died, *sorted(others, key=lambda each: each["number"])


if __name__ == "__main__":
    kinds = {
        "ddp": lambda: {name: run(replica, name, name == "int4") for name in HOOKS},
        "local_steps": lambda: run(local_replica),
        "example": run_example,
    }
    torch.save(kinds[sys.argv[1]](), sys.argv[2])
