"""One self-contained HTML page about a run or a comparison: `page.write_report(folder)`."""
