"""The checks of the conformance suite, each a promise that every method keeps. `wardround.methods.check` runs them."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from wardround.answering import logits_in_batches
from wardround.federation.messages import Message
from wardround.federation.rounds import TRAIN
from wardround.federation.rules import Owner, Rules
from wardround.federation.server import Reply
from wardround.methods.trial import CLASSES, CLIENTS, Bench, State, Trial, Visit

# ---- who owns what


def check_ownership(bench: Bench) -> None:
    """Every state entry has one owner, the frozen blocks are frozen, and names of one tensor agree."""
    model, rules = bench.network.model(bench.method), bench.method.rules
    owners = rules(model).owners
    state = model.state_dict()
    _none(state.keys() ^ owners.keys(), "without an owner, or owned but not there")
    _none([name for name, owner in owners.items() if not isinstance(owner, Owner)], "owned by no Owner")
    prefix = Rules.of(model).frozen(model.frozen, model.prompts).names(Owner.FROZEN)
    _none([name for name in prefix if owners[name] is not Owner.FROZEN], "in the frozen blocks and not frozen")
    _require(rules(model).owners == owners, "asked twice, the rules differ")
    seen: dict[int, str] = {}
    for name, tensor in state.items():
        first = seen.setdefault(tensor.data_ptr(), name) if tensor.numel() else name
        _require(owners[name] is owners[first], f"{name!r} and {first!r} are one tensor with two owners")


def check_names(bench: Bench) -> None:
    """Rules go by module object or type: with every module of the backbone renamed, each tensor keeps its owner."""
    model = bench.network.model(bench.method)
    owners = list(bench.method.rules(model).owners.items())
    renamed = copy.deepcopy(model)
    for block in [*renamed.frozen, *renamed.tuned]:
        _rename(block)
    for (name, owner), other in zip(owners, bench.method.rules(renamed).owners.values(), strict=True):
        _require(owner is other, f"{name!r} is {owner}, but {other} once its module is renamed: do not select by name")


def _rename(module: nn.Module) -> None:
    """Give every child a name that would mislead a search for words; attributes still lead to it."""
    for parent in list(module.modules()):
        children = list(parent._modules.items())
        parent._modules.clear()
        for number, (name, child) in enumerate(children):
            plain = name.isdigit()  # a place in a list, which torch looks up by number
            parent._modules[name if plain else f"bn_norm_head_{number}"] = child
            if not plain:
                parent.__dict__[name] = child


def check_frozen(bench: Bench) -> None:
    """Training changes no frozen tensor by a single bit: no weight, and no running statistic of a batch norm."""
    frozen = set(bench.rules.names(Owner.FROZEN))
    for visit in bench.trial.visits():
        _none(visit.changed & frozen, f"frozen, and changed by client {visit.client!r} in round {visit.round}")


def check_training(bench: Bench) -> str | None:
    """Something that is not frozen does train, losses are finite, and so is all that a client keeps."""
    visits = bench.trial.visits("large")
    if not (bench.rules.names(Owner.SHARED, Owner.LOCAL) or any(visit.up.tensors for visit in visits)):
        return "everything is frozen"
    _require(any(visit.changed for visit in visits), "nothing changes: the method has nothing to do on this network")
    for visit in bench.trial.visits():
        _check_finite(visit)
    return None


def _check_finite(visit: Visit) -> None:
    where = f"client {visit.client!r} in round {visit.round}"
    if visit.changed and visit.up.scalars["examples"]:
        _require(visit.up.scalars["loss"] is not None, f"the loss of {where} is not finite")
    bad = [n for n, t in visit.after.items() if t.is_floating_point() and not torch.isfinite(t).all()]
    _none(bad, f"not finite at {where}")


# ---- what travels


def check_wire(bench: Bench) -> None:
    """Nothing local or frozen travels, in either direction, by name or by content."""
    side = bench.trial.side
    shared = set(bench.rules.names(Owner.SHARED))
    targets = set(bench.method.target_shapes(side))
    for visit in bench.trial.visits():
        _none(visit.down.under("state").keys() - shared, "sent to clients and not shared")
        _none(visit.down.under("target").keys() - targets, "sent to clients and not announced by target_shapes")
        expected = shared if bench.method.sends_state(visit.phase) else set()
        _require(visit.up.under("state").keys() == expected, "a reply's state is not exactly the shared entries")
        sent, announced = visit.up.under("statistic").keys(), side.statistic_shapes(visit.phase).keys()
        right = sent <= announced if bench.method.optional_statistics else sent == announced
        _require(right, "statistics are not those announced")
    _check_contents(bench)


def _check_contents(bench: Bench) -> None:
    """No tensor on the wire has the values of a frozen one, or of a local one that a client has trained.

    From the second round on, when what is personal has parted from what is shared.
    """
    start = bench.trial.history.servers[0]
    visits = [visit for visit in bench.trial.visits() if visit.round > 1]
    private = list(bench.rules.pick(bench.model.state_dict(), Owner.FROZEN).items())
    private += [(n, t) for visit in visits for n, t in visit.after.items() if n in visit.changed]
    private = [(n, t) for n, t in private if _is_telling(t)]
    for visit in visits:
        for direction, message in (("sent to", visit.down), ("sent by", visit.up)):
            for name, tensor in _moved(message, start).items():
                same = [
                    n for n, t in private if t.numel() == tensor.numel() and torch.equal(t.flatten(), tensor.flatten())
                ]
                _none(same, f"private, but {direction} client {visit.client!r} as {name!r}")


def _moved(message: Message, start: State) -> State:
    """A message's tensors, without state that is still as it was at the start and tells nothing about a client."""
    state = {n: t for n, t in message.under("state").items() if not torch.equal(t, start[n])}
    return {**message.under("target"), **message.under("statistic"), **state}


def _is_telling(tensor: Tensor) -> bool:
    """Whether a tensor holds more than one value: ones and zeros may meet by chance."""
    return tensor.is_floating_point() and tensor.numel() > 1 and bool((tensor != tensor.flatten()[0]).any())


# ---- aggregation


def check_averages(bench: Bench) -> str | None:
    """Shared entries are averaged by weight, buffers too; of a counter the largest is kept.

    Where a method aggregates in its own way, this is asked of the buffers alone.
    """
    if len(bench.method.phases(1)) != 1:
        return "a round has several exchanges"
    parameters = {name for name, _ in bench.model.named_parameters()}
    names = [n for n in bench.rules.names(Owner.SHARED) if bench.averages or n not in parameters]
    for round in range(1, bench.rounds + 1):
        visits = [v for v in bench.trial.visits(round=round) if bench.method.sends_state(v.phase)]
        replies = [Reply(v.client, v.up) for v in visits if v.up.scalars["examples"]]
        weights = [bench.method.weight(reply) for reply in replies]
        states = [reply.message.under("state") for reply in replies]
        for name in names:
            expected = _average([state[name] for state in states], weights)
            found = bench.trial.history.servers[round][name]
            near = torch.allclose(found.double(), expected, rtol=1e-5, atol=1e-7)
            _require(near, f"{name!r} is not the weighted average of the clients' after round {round}")
    return None if names else "nothing that is shared is averaged"


def _average(tensors: list[Tensor], weights: list[float]) -> Tensor:
    if not tensors[0].is_floating_point():
        return torch.stack(tensors).amax(0).double()
    return sum((w * t.double() for w, t in zip(weights, tensors, strict=True)), torch.zeros(())) / sum(weights)


def check_one_client(bench: Bench) -> str | None:
    """A federation of one client is local training: the server's state is the client's own, to the bit."""
    if not bench.averages:
        return "the method aggregates in its own way"
    if not bench.rules.names(Owner.SHARED):
        return "nothing is shared"
    trial = Trial(bench.method, bench.network, ["large"]).run(bench.rounds)
    visits = [visit for visit in trial.visits() if visit.phase == TRAIN]
    for round, (visit, server) in enumerate(zip(visits, trial.history.servers[1:], strict=True), 1):
        sent = visit.up.under("state")
        _none(
            [n for n, t in server.items() if not torch.equal(t, sent[n])], f"not the only client's own in round {round}"
        )
    return None


# ---- what stays


def check_persistence(bench: Bench) -> str | None:
    """A client finds its local entries as it left them, and they differ between clients once they have trained."""
    if not bench.rules.names(Owner.LOCAL):
        return "nothing is local"
    for client in CLIENTS:
        first, *later = visits = bench.trial.visits(client)
        for before, now in zip([first, *later], later, strict=False):
            lost = [n for n, t in now.before.items() if not torch.equal(t, before.after[n])]
            _none(lost, f"not as client {client!r} left it in round {before.round}")
        _require(visits[-1].after.keys() == set(bench.rules.names(Owner.LOCAL)), "local entries are not all kept")
    one, other = (_trained(bench.trial.visits(client)) for client in ("large", "small"))
    both = [n for n in one if n in other and _is_telling(one[n])]
    alike = [n for n in both if torch.equal(one[n], other[n])]
    _require(not both or len(alike) < len(both), f"local, and the same at two clients: {', '.join(alike)}")
    return None


def _trained(visits: list[Visit]) -> State:
    """What a client keeps in the end of the local entries that any of its visits changed."""
    changed = frozenset[str]().union(*(visit.changed for visit in visits))
    return {name: tensor for name, tensor in visits[-1].after.items() if name in changed}


def check_independence(bench: Bench) -> None:
    """With the same messages, a client computes the same whether or not others have been there before it."""
    alone = bench.trial.new_answerer()
    for visit in bench.trial.visits("small"):
        reply = alone.codec.decode(alone.answer("small", visit.frame))
        _equal(reply, visit.up, f"depends on who else was there (client 'small', round {visit.round})")


def check_restored(bench: Bench) -> None:
    """After a visit every module is in eval mode and every parameter needs a gradient as it did before."""
    answerer = bench.trial.new_answerer()
    flags = {name: p.requires_grad for name, p in answerer.model.named_parameters()}
    for visit in bench.trial.visits("small"):
        answerer.answer("small", visit.frame)
        now = {name: p.requires_grad for name, p in answerer.model.named_parameters()}
        _none([n for n in flags if flags[n] != now[n]], "with requires_grad left changed")
        _none([n for n, m in answerer.model.named_modules() if m.training], "left in training mode")


# ---- ordinary extremes


def check_small_batches(bench: Bench) -> None:
    """Batches of one image, a client with one image and absent classes leave everything finite."""
    trial = Trial(bench.method, bench.network, {"three": (1, 0, 2, 0), "single": (0, 0, 1, 0)}, batch_size=1)
    for visit in trial.run(bench.rounds).visits():
        _check_finite(visit)


def check_empty_client(bench: Bench) -> None:
    """A client without images answers with 0 examples, changes nothing and weighs nothing."""
    for visit in bench.trial.visits("empty"):
        _require(visit.up.scalars["examples"] == 0, "a client without images claims to have some")
        _none(visit.changed, "changed by a client without images")
        sent, received = visit.up.under("state"), visit.down.under("state")
        _none([n for n in sent if not torch.equal(sent[n], received[n])], "changed by a client without images")
    without = Trial(bench.method, bench.network, [name for name in CLIENTS if name != "empty"]).run(bench.rounds)
    for ours, theirs in zip(bench.trial.history.servers, without.history.servers, strict=True):
        moved = [n for n in ours if not torch.equal(ours[n], theirs[n])]
        _none(moved, "different at the server with a client that has no images")


def check_determinism(bench: Bench) -> None:
    """A second run from scratch gives the same bits."""
    again = Trial(bench.method, bench.network).run(bench.rounds)
    for first, second in zip(bench.trial.visits(), again.visits(), strict=True):
        where = f"differs in a second run (client {first.client!r}, round {first.round})"
        _equal(first.down, second.down, where)
        _equal(first.up, second.up, where)
        _none([n for n, t in first.after.items() if not torch.equal(t, second.after[n])], where)


def check_prediction(bench: Bench) -> None:
    """Predicting changes nothing, repeats itself, and an image's logits do not depend on the images beside it."""
    trial = bench.trial
    answerer, last = trial.answerer, trial.visits("large")[-1]
    client = answerer.load("large", last.down)
    before, memory = _everything(client.model), {name: tensor.clone() for name, tensor in client.memory.items()}
    images = trial.federation.client("large").test
    first, second = (torch.from_numpy(answerer.logits(client, "test", images)) for _ in range(2))
    now = _everything(client.model)
    _none([n for n in before if not torch.equal(before[n], now[n])], "changed by predicting")
    kept = client.memory.keys() == memory.keys() and all(torch.equal(client.memory[n], t) for n, t in memory.items())
    _require(kept, "predicting changes the client's memory")
    _require(first.shape == (len(images), CLASSES), f"logits have shape {tuple(first.shape)}")
    _require(torch.equal(first, second), "the same images are predicted differently the second time")
    inputs, modality = answerer.client_inputs("large", "test"), torch.from_numpy(images.modality)
    single = torch.from_numpy(logits_in_batches(bench.method.predict, client, inputs, len(images), 1, modality))
    _require(torch.allclose(single, first, rtol=1e-3, atol=1e-4), "an image's logits depend on the images beside it")


def _everything(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer, those outside the state too, and every module's mode, copied."""
    tensors = {name: t.detach().clone() for name, t in [*model.named_parameters(), *model.named_buffers()]}
    return tensors | {f"mode of {name}": torch.tensor(m.training) for name, m in model.named_modules()}


# ---- words


def _require(holds: bool, problem: str) -> None:
    """Like `assert`, which an optimising interpreter leaves out."""
    if not holds:
        raise AssertionError(problem)


def _none(names: Iterable[str], problem: str) -> None:
    """There must be no such names."""
    found = sorted(names)
    _require(not found, f"{', '.join(map(repr, found[:3]))}{' and more' * (len(found) > 3)}: {problem}")


def _equal(one: Message, other: Message, problem: str) -> None:
    """Two messages say the same, clocks apart."""
    _require(one.tensors.keys() == other.tensors.keys(), problem)
    _none([n for n, t in one.tensors.items() if not torch.equal(t, other.tensors[n])], problem)
    losses = [message.scalars.get("loss") for message in (one, other)]
    _require(losses[0] == losses[1], f"loss: {problem}")
