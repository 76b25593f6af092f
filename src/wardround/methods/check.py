"""The conformance suite: what every method must keep to, whatever it computes.

It works from a method's hooks alone, so that a method of your own is checked like ours:

    from wardround.methods.base import FedAvg
    from wardround.methods.check import NETWORKS, check_method

    class FedProx(FedAvg):
        mu: float = 0.01

        def train(self, client, phase):
            client.scratch["received"] = [(p, p.detach().clone()) for p in self.parameters(client)]
            return super().train(client, phase)

        def loss(self, step):
            distance = sum((p - start).square().sum() for p, start in step.client.scratch["received"])
            return super().loss(step) + self.mu / 2 * distance

    @pytest.mark.parametrize("network", NETWORKS)
    def test_fedprox(network):
        check_method(FedProx(mu=0.1), network)

An AssertionError says which promise is broken, by which tensor of which client. A single check, of those in
`wardround.methods.checks`, is run by `check_wire(Bench(FedProx(), NETWORKS["bn-cnn"]))`.
"""

from __future__ import annotations

from collections.abc import Callable

from wardround.captions.options import CaptionOptions
from wardround.errors import InputError
from wardround.methods.base import Method
from wardround.methods.checks import (
    check_averages,
    check_determinism,
    check_empty_client,
    check_frozen,
    check_independence,
    check_names,
    check_one_client,
    check_ownership,
    check_persistence,
    check_prediction,
    check_restored,
    check_small_batches,
    check_training,
    check_wire,
)
from wardround.methods.trial import ROUNDS, Bench, Network

NETWORKS: dict[str, Network] = {
    "bn-cnn": Network("wardround:cnn-bn", 20, 2),
    "gn-cnn": Network("wardround:cnn-gn", 20, 2),
    "resnet4": Network("wardround:resnet4-lib", 16, 1, logit_corrector="prior"),
    "vit-tiny": Network("wardround:vit-tiny", 16, "all", head="shared"),
    "captioned": Network(
        "wardround:resnet4-lib", 16, 1, captions=CaptionOptions(provider="template", text_encoder="tiny")
    ),
    "encoder": Network("wardround:resnet4-lib", 16, 0, dropout=0.0, text=True),
    "resnet18": Network("torchvision:resnet18", 32, 1),
    "densenet121": Network("torchvision:densenet121", 32, 1),
    "efficientnet-b0": Network("torchvision:efficientnet_b0", 64, 2),
}
"""Networks by name, the fast ones first: batch norm, group norm, a logit corrector, tokens and nothing frozen, images
with captions, all frozen with a text side; the last three nest their layers deeply."""

Check = Callable[[Bench], str | None]
CHECKS: dict[str, Check] = {
    check.__name__.removeprefix("check_"): check
    for check in (
        check_ownership,
        check_names,
        check_wire,
        check_frozen,
        check_training,
        check_averages,
        check_one_client,
        check_persistence,
        check_determinism,
        check_independence,
        check_restored,
        check_small_batches,
        check_empty_client,
        check_prediction,
    )
}
"""The checks by name, in their order. Each returns why it does not apply, or nothing."""

PASSED = "passed"


def check_method(method: Method, network: str | Network, rounds: int = ROUNDS) -> dict[str, str]:
    """Hold `method` on `network` (a name of `NETWORKS`, or one of your own) to every check.

    Returns:
        By check, `passed` or the reason why it does not apply. A method whose `edit` raises InputError for this
        network is not applicable to it in any respect.

    Raises:
        AssertionError: a promise is broken; the message names the check and what is wrong.
    """
    network = NETWORKS[network] if isinstance(network, str) else network
    try:
        network.model(method)
    except InputError as error:
        return dict.fromkeys(CHECKS, f"not applicable: {error}")
    bench = Bench(method, network, rounds)
    return {name: _outcome(name, check, bench) for name, check in CHECKS.items()}


def _outcome(name: str, check: Check, bench: Bench) -> str:
    try:
        reason = check(bench)
    except Exception as error:
        kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
        raise AssertionError(f"{bench.method.name or type(bench.method).__name__}, {name}: {kind}{error}") from error
    return PASSED if reason is None else f"not applicable: {reason}"
