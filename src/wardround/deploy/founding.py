"""`deploy init`: certificates, keys, and one folder to hand to each side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import tomli_w

from wardround.captions.options import CaptionOptions
from wardround.config import Experiment
from wardround.data.read import list_records, read_federation
from wardround.deploy.agreement import CAPTIONS, Agreement, Parties, read_options
from wardround.deploy.authority import (
    Certified,
    check_dates,
    new_authority,
    new_key,
    private_pem,
    public_pem,
    read_private,
    server_certificate,
    write_private,
)
from wardround.deploy.settings import CLIENT, SERVER, ServerSettings, is_loopback
from wardround.errors import InputError

CA, CA_KEY = "ca.pem", "ca.key"
CERTIFICATE, KEY = "server.pem", "server.key"
CLIENT_KEY, CLIENTS = "client.key", "clients"
SERVER_README = """# The server of a federation of {count} clients

Clients reach it as {address}. It holds no images.

    wardround deploy server .      # begins, or goes on where it was
    wardround deploy status .      # in another terminal: who is connected, the round, the last word from each

`server.key` is secret. The results are in `run/`: `wardround report run`.
"""
CLIENT_README = """# {name}: its part in a federation

Nothing but what the dry run prints leaves this machine. Say in `client.toml` where the images are, then:

    wardround deploy client . --dry-run     # checks the images, and prints what would be sent, by name, shape and bytes
    wardround deploy client .               # takes part; started again, it goes on

`client.key` is secret: whoever has it can pass for {name}. Your model is in the folder whose name the client prints
when it starts: `wardround predict FOLDER IMAGE...`.
"""
CLIENT_TOML = """# What {name} chooses for itself.
{basics}
# Where this hospital's images are. Other keys as in the [data] section of experiment.toml.
[data]
{path}
# Where this hospital has another word for a class: "its word" = "the federation's word" ({classes}).
[labels]

# The same for modalities ({modalities}).
[modalities]
"""
CLIENT_CAPTIONS = """
# Where this hospital's captions come from, where that is not as in experiment.toml: provider, file, callable, phrases,
# coverage, filter, text_encoder and the like. They stay here. coverage = 0 does without.
[captions]
{own}"""


@dataclass(frozen=True)
class Plan:
    """What `deploy init` is asked for.

    Attributes:
        experiment: to run.
        clients: names; empty for the sites of the experiment's data.
        classes: names; empty for those of the experiment's data.
        settings: of the server.
        min_count: see `Parties`.
        as_it_is: leave the method as the experiment has it, instead of what says least of single images.
    """

    experiment: Experiment
    clients: Sequence[str]
    classes: Sequence[str]
    settings: ServerSettings
    min_count: int
    as_it_is: bool = False


def found(plan: Plan, out: Path) -> list[Path]:
    """Make the folders of all sides below `out`.

    Returns:
        The server's folder, then the clients', in their order.

    Raises:
        InputError: `out` is not empty, names repeat, or the classes are neither given nor to be read from the data.
    """
    if out.exists() and any(out.iterdir()):
        raise InputError(f"{out}: is not empty; give another --out")
    agreement = agree(plan)
    authority = new_authority("Wardround federation")
    _authority(out / "authority", authority)
    keys = {name: new_key() for name in agreement.parties.clients}
    server = out / "server"
    _server(server, agreement, plan.settings, authority, {name: public_pem(key) for name, key in keys.items()})
    return [server] + [_client(out, name, agreement, plan, authority, private_pem(key)) for name, key in keys.items()]


def agree(plan: Plan) -> Agreement:
    """The agreement of a plan."""
    _refuse_held_out(plan.experiment)
    clients, classes = plan.clients, plan.classes
    modalities: tuple[str, ...] = ("image",)
    if not (clients and classes):
        known = _of_data(plan.experiment)
        clients, classes, modalities = clients or known.clients, classes or known.classes, known.modalities
    for what, names in (("--clients", clients), ("--classes", classes)):
        twice = sorted({name for name in names if list(names).count(name) > 1})
        if twice or not all(names):
            raise InputError(f"{what}: {', '.join(twice) or 'an empty name'} cannot be; each name once, none empty")
    experiment = plan.experiment if plan.as_it_is else discreet(plan.experiment)
    parties = Parties(clients=tuple(clients), classes=tuple(classes), modalities=modalities, min_count=plan.min_count)
    return Agreement(experiment.complete(), parties)


def _refuse_held_out(experiment: Experiment) -> None:
    """InputError for what needs the images of a site that is no client: a deployment's server has no images."""
    method, data = experiment.bound_method(), experiment.data
    if method.transductive:
        raise InputError(f"method.name = {method.name}: its clients look at another site's images; those stay there")
    if data.held_out or data.held_out_share:
        raise InputError("data.held_out: nobody in a deployment has its images; remove the key, or judge by hand there")


def discreet(experiment: Experiment) -> Experiment:
    """The experiment with the method as it says least of single images."""
    method = experiment.bound_method().discreet()
    return experiment.model_copy(update={"method": {"name": method.name, **method.to_toml()}})


def _of_data(experiment: Experiment) -> Parties:
    """Who and what the experiment's own data know of."""
    if experiment.data.source == "phantoms":
        data = read_federation(experiment.data, experiment.seed)
        return Parties(clients=data.names, classes=data.classes, modalities=data.modalities)
    try:
        listing = list_records(experiment.data)
    except InputError as error:
        raise InputError(f"--clients and --classes are needed where the images are not here: {error}") from error
    kinds = sorted({record.modality or "image" for record in listing.records})
    sites = listing.sites or tuple(sorted({record.site for record in listing.records}))
    return Parties(clients=sites, classes=listing.label_space, modalities=tuple(kinds))


def renew(server: Path, authority: Path) -> None:
    """Give the server in a folder a new certificate of the same authority.

    Raises:
        InputError: a file is missing, or the authority's own certificate has expired.
    """
    settings = read_options(server / SERVER, ServerSettings)
    known = Certified(check_dates(authority / CA), read_private(authority / CA_KEY))
    _certify(server, settings, known)


def _authority(folder: Path, authority: Certified) -> None:
    folder.mkdir(parents=True)
    (folder / CA).write_bytes(authority.pem)
    write_private(folder / CA_KEY, authority.private_pem)


def _server(
    folder: Path, agreement: Agreement, settings: ServerSettings, authority: Certified, keys: dict[str, bytes]
) -> None:
    (folder / CLIENTS).mkdir(parents=True)
    agreement.write(folder)
    (folder / SERVER).write_text(tomli_w.dumps(settings.model_dump(exclude_none=True)), encoding="utf-8")
    (folder / CA).write_bytes(authority.pem)
    _certify(folder, settings, authority)
    for name, public in keys.items():
        (folder / CLIENTS / f"{quote(name, safe='')}.pub").write_bytes(public)
    text = SERVER_README.format(count=len(keys), address=settings.address)
    (folder / "README.md").write_text(text, encoding="utf-8")


def _certify(folder: Path, settings: ServerSettings, authority: Certified) -> None:
    hosts = dict.fromkeys([settings.host, *(["localhost", "127.0.0.1"] if is_loopback(settings.host) else [])])
    server = server_certificate(authority, list(hosts))
    (folder / KEY).unlink(missing_ok=True)
    write_private(folder / KEY, server.private_pem)
    (folder / CERTIFICATE).write_bytes(server.pem)


def _client(out: Path, name: str, agreement: Agreement, plan: Plan, authority: Certified, key: bytes) -> Path:
    folder = out / f"client-{quote(name, safe='')}"
    folder.mkdir()
    agreement.write(folder)
    (folder / CA).write_bytes(authority.pem)
    write_private(folder / CLIENT_KEY, key)
    parties = agreement.parties
    basics = {"name": name, "server": plan.settings.address, "min_count": parties.min_count}
    at_hand = plan.experiment.data.path or ("" if plan.experiment.data.source == "phantoms" else "FILL-IN")
    text = CLIENT_TOML.format(
        name=name,
        basics=tomli_w.dumps(basics),
        path=tomli_w.dumps({"path": at_hand} if at_hand else {}),
        classes=", ".join(parties.classes),
        modalities=", ".join(parties.modalities),
    )
    (folder / CLIENT).write_text(text + _captions(agreement.experiment.captions), encoding="utf-8")
    (folder / "README.md").write_text(CLIENT_README.format(name=name), encoding="utf-8")
    return folder


def _captions(agreed: CaptionOptions) -> str:
    """The section of `client.toml` that says where a hospital's captions are; empty where there are to be none."""
    if agreed.provider == "none":
        return ""
    own = {"file": f'file = "{CAPTIONS}"\n', "callable": '# callable = "module:function"   # has to be named\n'}
    return CLIENT_CAPTIONS.format(own=own.get(agreed.provider, ""))


def client_keys(server: Path, clients: Sequence[str]) -> dict[str, bytes]:
    """Each client's public key, from the server's folder.

    Raises:
        InputError: one is missing.
    """
    found = {}
    for name in clients:
        file = server / CLIENTS / f"{quote(name, safe='')}.pub"
        try:
            found[name] = file.read_bytes()
        except OSError as error:
            raise InputError(f"{file}: the public key of {name} cannot be read ({error.strerror or error})") from error
    return found
