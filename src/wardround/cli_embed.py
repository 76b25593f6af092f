"""The command `embed`."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from wardround.cli_base import AsJson, command, out_console, say, tell


@command("embed")
def embed_command(
    folders: Annotated[list[Path], typer.Argument(metavar="FOLDER...", help="of finished runs or comparisons")],
    model: Annotated[Literal["personal", "server"], typer.Option(help="which of each client's models")] = "personal",
    max_images: Annotated[int, typer.Option(min=2, help="test images of each client")] = 200,
    perplexity: Annotated[float, typer.Option(min=1, help="of t-SNE: about how many neighbours an image has")] = 30.0,
    out: Annotated[
        Path | None,
        typer.Option(help="by default <FOLDER>/embedding, or runs/<FOLDER>-embedding of several"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Draw what the networks of finished runs make of test images (t-SNE), coloured by modality and by class.

    Figures say how far modalities and classes lie apart. Of a comparison every system is drawn, with its first seed.
    """
    from wardround.display import print_tables
    from wardround.embedding import Settings, embed
    from wardround.federation.files import write_atomically
    from wardround.report.embedding_page import embedding_markdown, embedding_tables
    from wardround.report.embedding_picture import save_embedding
    from wardround.run_folder import make_folder, write_json

    record = embed(folders, Settings(model, max_images, perplexity), tell)
    folder = out or (folders[0] / "embedding" if len(folders) == 1 else Path("runs") / f"{folders[0].name}-embedding")
    make_folder(folder, "the embedding's folder")
    write_json(folder / "embedding.json", record)
    files = save_embedding(folder, record)
    page = embedding_markdown(record, files, shlex.join(["wardround", *sys.argv[1:]]))
    write_atomically(folder / "embedding.md", page.encode(), durable=False)
    if as_json:
        print(json.dumps(record))
        return
    print_tables(out_console, embedding_tables(record))
    for note in record["notes"]:
        say(f"- {note}")
    say(f"written: {folder / 'embedding.md'} and {', '.join(file.name for file in files)}")
