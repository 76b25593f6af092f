"""Certificates, keys, the folders that are handed out, and what each side may say in its own."""

from __future__ import annotations

import os
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509

from deploy_fixtures import founded, spoken_of
from experiment_fixtures import CLIENTS, tiny
from wardround.deploy import authority as keys
from wardround.deploy.agreement import Agreement, Parties, read_agreement
from wardround.deploy.founding import client_keys, discreet, renew
from wardround.deploy.hospital import local_experiment, open_hospital, read_settings
from wardround.deploy.serving import prepare
from wardround.errors import InputError


def rewrite(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


# ---- certificates and keys


def test_a_server_certificate_is_the_authoritys_and_names_its_hosts() -> None:
    authority = keys.new_authority("test")
    server = keys.server_certificate(authority, ["hospital.example", "10.0.0.7"])
    server.certificate.verify_directly_issued_by(authority.certificate)
    names = server.certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["hospital.example"]
    assert [str(address) for address in names.get_values_for_type(x509.IPAddress)] == ["10.0.0.7"]


@pytest.mark.parametrize(("shift", "said"), [(-4000, "is not valid yet"), (4000, "has expired")])
def test_dates_are_compared_with_the_clock(tmp_path: Path, shift: int, said: str) -> None:
    file = tmp_path / "server.pem"
    file.write_bytes(keys.server_certificate(keys.new_authority("test"), ["localhost"]).pem)
    keys.check_dates(file)
    with pytest.raises(InputError, match=rf"server\.pem: the certificate {said}: valid from .* clock says"):
        keys.check_dates(file, datetime.now(UTC) + timedelta(days=shift))


def test_an_expired_certificate_is_refused_where_it_lies(tmp_path: Path) -> None:
    server = founded(tmp_path / "d")[0]
    authority = keys.new_authority("test")
    (server / "server.pem").write_bytes(keys.server_certificate(authority, ["localhost"], days=-1).pem)
    with pytest.raises(InputError, match="has expired"):
        prepare(server, insecure=False)
    renew(server, tmp_path / "d" / "authority")
    prepare(server, insecure=False)


@pytest.mark.skipif(os.name != "posix", reason="file modes are POSIX")
def test_secrets_are_their_owners_alone(tmp_path: Path) -> None:
    server, *clients = founded(tmp_path / "d")
    secrets = [server / "server.key", tmp_path / "d" / "authority" / "ca.key", *(c / "client.key" for c in clients)]
    assert {stat.S_IMODE(file.stat().st_mode) for file in secrets} == {0o600}
    secrets[-1].chmod(0o640)
    with pytest.raises(InputError, match="others may read this private key"):
        keys.read_private(secrets[-1])


@pytest.mark.parametrize("content", [b"", b"rubbish", keys.new_authority("test").pem])
def test_what_is_no_key_is_named(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "client.key"
    keys.write_private(file, content)
    with pytest.raises(InputError, match="is no private key"):
        keys.read_private(file)


# ---- folders


def test_each_side_gets_what_it_needs_and_no_more(tmp_path: Path) -> None:
    server, *clients = founded(tmp_path / "d")
    assert client_keys(server, CLIENTS).keys() == set(CLIENTS)
    for folder in clients:
        assert read_agreement(folder).digest == read_agreement(server).digest
        assert {path.name for path in folder.iterdir()} == {
            "README.md", "ca.pem", "client.key", "client.toml", "experiment.toml", "federation.toml"
        }  # fmt: skip
    assert not list(server.rglob("client.key"))
    assert not list(server.rglob("ca.key"))
    with pytest.raises(InputError, match="is not empty"):
        founded(tmp_path / "d")


def test_pafp_is_deployed_with_statistics_per_channel_unless_asked_otherwise(tmp_path: Path) -> None:
    experiment = spoken_of(method__name="pafp", method__groups=1)
    assert discreet(experiment).method["reduce"] == "channel"
    agreed = read_agreement(founded(tmp_path / "a", experiment)[0])
    assert agreed.experiment.method["reduce"] == "channel"
    kept = read_agreement(founded(tmp_path / "b", experiment, as_it_is=True)[0])
    assert kept.experiment.method["reduce"] == "element"
    assert agreed.digest != kept.digest
    assert discreet(tiny()).method["name"] == "fedavg"


@pytest.mark.parametrize("names", [("a", "a"), ("a", "")])
def test_names_are_checked(tmp_path: Path, names: tuple[str, ...]) -> None:
    with pytest.raises(InputError, match=r"--clients: .* cannot be"):
        founded(tmp_path / "d", clients=names)


def test_without_images_here_clients_and_classes_are_asked_for(tmp_path: Path) -> None:
    experiment = tiny(data__source="table", data__path=str(tmp_path / "nowhere"))
    with pytest.raises(InputError, match="--clients and --classes are needed"):
        founded(tmp_path / "d", experiment)
    folders = founded(tmp_path / "d", experiment, classes=("x", "y"))
    assert str(tmp_path / "nowhere") not in (folders[1] / "experiment.toml").read_text()


def test_the_digest_covers_all_that_is_agreed_on_and_no_place() -> None:
    parties = Parties(clients=("a", "b"), classes=("x", "y"))
    table = {"data__source": "table", "data__path": "/one"}
    base = Agreement(tiny(**table), parties)
    assert Agreement(tiny(**table | {"data__path": "/two"}), parties).digest == base.digest
    others = [
        Agreement(tiny(**table, seed=4), parties),
        Agreement(tiny(**table, rounds=5), parties),
        Agreement(tiny(**table), Parties(clients=("b", "a"), classes=("x", "y"))),
        Agreement(tiny(**table), Parties(clients=("a", "b"), classes=("y", "x"))),
        Agreement(tiny(**table), Parties(clients=("a", "b"), classes=("x", "y"), min_count=10)),
    ]
    assert len({base.digest, *(other.digest for other in others)}) == 6


# ---- settings


def test_a_clients_name_must_be_a_partys(tmp_path: Path) -> None:
    folder = founded(tmp_path / "d")[1]
    rewrite(folder / "client.toml", 'name = "site-01"', 'name = "site-1"')
    with pytest.raises(InputError, match=r"there is no client 'site-1' \(did you mean 'site-01'\?\)"):
        read_settings(folder)


def test_min_count_may_be_raised_and_not_lowered(tmp_path: Path) -> None:
    folder = founded(tmp_path / "d")[1]
    rewrite(folder / "client.toml", "min_count = 20", "min_count = 30")
    assert read_settings(folder).min_count == 30
    rewrite(folder / "client.toml", "min_count = 30", "min_count = 19")
    with pytest.raises(InputError, match="19 is below the 20 that all have agreed on"):
        read_settings(folder)


def test_a_client_chooses_where_its_images_are_and_not_what_they_become(tmp_path: Path) -> None:
    experiment = tiny(data__source="table", data__path="/elsewhere")
    folder = founded(tmp_path / "d", experiment, classes=("x", "y"))[1]
    agreement = read_agreement(folder)
    rewrite(folder / "client.toml", 'path = "/elsewhere"', 'path = "mine"\non_bad_image = "skip"')
    own = local_experiment(folder, agreement, read_settings(folder), None)
    assert own.data.path == str(folder / "mine")
    assert own.data.on_bad_image == "skip"
    rewrite(folder / "client.toml", 'on_bad_image = "skip"', "image_size = 64")
    with pytest.raises(InputError, match=r"data\.image_size is the same for all"):
        local_experiment(folder, agreement, read_settings(folder), None)


def test_plain_text_stays_on_this_machine(tmp_path: Path) -> None:
    from wardround.deploy.attending import credentials

    server, client, *_ = founded(tmp_path / "d")
    prepare(server, insecure=True)
    rewrite(server / "server.toml", 'listen = "127.0.0.1"', 'listen = "0.0.0.0"')
    with pytest.raises(InputError, match="plain text, which is for this machine alone"):
        prepare(server, insecure=True)
    settings = read_settings(client)
    assert credentials(client, settings, insecure=True)[0] is None
    with pytest.raises(InputError, match="plain text"):
        credentials(client, settings.model_copy(update={"server": "hospital.example:9443"}), insecure=True)


# ---- images


def table(folder: Path, rows: list[tuple[str, str]], site: str | None = None) -> None:
    """A table of little images: (label, split) a row."""
    import numpy as np
    from PIL import Image

    folder.mkdir()
    head = "image,label,split" + (",site" if site else "")
    lines = [head]
    for number, (label, split) in enumerate(rows):
        pixels = np.random.default_rng(number).integers(0, 255, (32, 32, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
        lines.append(f"{number}.png,{label},{split}" + (f",{site}" if site else ""))
    (folder / "metadata.csv").write_text("\n".join(lines) + "\n")


ROWS = [(label, split) for split in ("train", "train", "test") for label in ("Naevus", "mel")]


def deployed_table(tmp_path: Path, rows: list[tuple[str, str]], site: str | None = None, labels: str = "") -> Path:
    """A client's folder whose images are a table."""
    experiment = tiny(data__source="table", data__path="/elsewhere")
    folder = founded(tmp_path / "d", experiment, classes=("mel", "nv"), min_count=0)[1]
    table(tmp_path / "images", rows, site)
    rewrite(folder / "client.toml", 'path = "/elsewhere"', f'path = "{tmp_path / "images"}"')
    rewrite(folder / "client.toml", "[labels]", f"[labels]\n{labels}")
    return folder


@pytest.mark.parametrize("site", [None, "site-01", "our ward"])
def test_a_hospitals_words_become_the_federations(tmp_path: Path, site: str | None) -> None:
    """With no column for the site, with its own name there, and with a name of its own."""
    hospital = open_hospital(deployed_table(tmp_path, ROWS, site, '"Naevus" = "nv"'))
    data = hospital.answerer.federation
    assert data.names == ("site-01",)
    assert data.classes == ("mel", "nv")
    assert data.clients[0].train.counts(2).tolist() == [2, 2]
    assert data.clients[0].test.counts(2).tolist() == [1, 1]


def test_a_label_that_is_not_in_the_list_is_named(tmp_path: Path) -> None:
    folder = deployed_table(tmp_path, ROWS)
    with pytest.raises(InputError, match=r"'Naevus' not in the federation's list \(mel, nv\); say in \[labels\]"):
        open_hospital(folder)


def test_images_that_are_not_fit_for_use_keep_a_client_out(tmp_path: Path) -> None:
    folder = deployed_table(tmp_path, ROWS, labels='"Naevus" = "nv"')
    (tmp_path / "images" / "0.png").unlink()
    with pytest.raises(InputError, match="not fit for use\n"):
        open_hospital(folder)


def test_a_class_that_is_only_tested_here_may_be_trained_elsewhere(tmp_path: Path) -> None:
    rows = [("mel", "train"), ("mel", "train"), ("nv", "test"), ("mel", "test")]
    assert open_hospital(deployed_table(tmp_path, rows)).said.splits["train"].n == 2


def test_images_of_several_sites_need_a_choice(tmp_path: Path) -> None:
    folder = deployed_table(tmp_path, ROWS, "a", '"Naevus" = "nv"')
    with (tmp_path / "images" / "metadata.csv").open("a") as file:
        file.write("0.png,Naevus,train,b\n")
    with pytest.raises(InputError, match=r"of 2 sites \(a, b\), none of which is 'site-01'"):
        open_hospital(folder)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    for look in (read_agreement, read_settings, open_hospital):
        with pytest.raises(InputError, match="cannot be read"):
            look(tmp_path / "nowhere")  # type: ignore[operator]


def test_unknown_keys_are_named(tmp_path: Path) -> None:
    folder = founded(tmp_path / "d")[1]
    rewrite(folder / "client.toml", "min_count = 20", "mincount = 20")
    with pytest.raises(InputError, match=r"client\.toml: min_count: is missing\nmincount: there is no such key"):
        read_settings(folder)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"data__held_out": ["site-03"]}, "data.held_out: nobody in a deployment has its images"),
        ({"method__name": "facmic"}, "facmic: its clients look at another site's images"),
    ],
)
def test_what_needs_images_of_a_site_that_is_no_client_is_refused(
    tmp_path: Path, changes: dict[str, object], said: str
) -> None:
    with pytest.raises(InputError, match=said):
        founded(tmp_path / "d", tiny(**changes))
