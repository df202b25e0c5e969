"""What W&B would be sent, and what a server at home receives."""

import json
import re
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import wandb

from tests.missing_packages import without_package
from tests.results import folders
from toolkit.cost import UNIT, simulate, unit_costs
from toolkit.errors import UserError
from toolkit.metric import ACCURACY, LOSS
from toolkit.results import Tracker, track_measured, track_schedule
from toolkit.results.report import build_report
from toolkit.results.report_page import Command, Report, Table, Text
from toolkit.results.runs import read_runs
from toolkit.results.wandb_report import publish, wandb_report
from toolkit.schedule import catalog

pytest.importorskip("wandb_workspaces", reason="wandb-workspaces is not installed")
KEY = "0123456789" * 4
EMPTY = {
    name: [] for name in ("Summary", "Accuracy", "Memory", "Communication", "Reproduce")
}


@pytest.fixture
def runs(tmp_path):
    """A comparison, one of a sweep, and a run that was tracked by itself."""
    for name in ("c", "s/0"):
        folders.compare(tmp_path / name, {"dp": [0.9], "cdp_v2": [0.7]}, tracking={})
    (tmp_path / "s" / "sweep.json").write_text("{}")
    folders.train(tmp_path / "t", batch=8)
    (tmp_path / "t" / "wandb_run.json").write_text('{"id": "abc12345", "group": null}')
    moved = [
        f"{what}_{way}"
        for what in ("messages", "bytes")
        for way in ("sent", "received")
    ]
    rank = dict.fromkeys(["rank", *moved], 0)
    return [replace(run, ranks=[rank]) for run in read_runs([tmp_path])]


def spec_of(report, runs):
    page, _ = wandb_report(report, runs, "me", "cdp")
    return json.loads(page._to_model().model_dump_json())["spec"]


def test_the_report_has_the_sections_their_panels_and_runs(runs):
    spec = spec_of(build_report(runs, "Title"), runs)
    headings = [
        b["children"][0]["text"] for b in spec["blocks"] if b["type"] == "heading"
    ]
    assert headings == [*EMPTY]
    grids = [b["metadata"] for b in spec["blocks"] if b["type"] == "panel-grid"]
    logged = (
        (
            "epoch/top1",
            "epoch/test_loss",
            "train/loss",
            "final/top1",
            "delay/cosine_stage_.*",
        ),
        ("schedule/grid", "schedule/activations_by_slot", "measured/memory"),
        ("measured/timeline", "schedule/traffic_by_slot", "measured/ranks"),
    )
    for grid, keys in zip(grids, logged, strict=True):
        words = json.dumps(grid["panel_bank_section_config"])
        assert [key for key in keys if f'"{key}"' not in words] == []
    groups, single = (json.dumps(of["filters"]) for of in grids[0]["run_sets"])
    assert '"group"' in groups
    assert '["c", "s/0"]' in groups
    assert '["abc12345"]' in single


@pytest.mark.parametrize(
    ("judged_by", "bars"),
    [
        ([], ["top1"]),
        ([LOSS], ["test_loss"]),
        ([LOSS, ACCURACY, LOSS], ["test_loss", "top1"]),
    ],
)
def test_report_and_workspace_have_bars_of_the_runs_metrics(runs, judged_by, bars):
    judged = [
        replace(run, judged_by=by) for run, by in zip(runs, judged_by, strict=False)
    ]
    other = replace(runs[0], kind="memory")
    report = Report("Runs = <1>", EMPTY)
    words = json.dumps(spec_of(report, [*judged, other]))
    assert [by for by in ("test_loss", "top1") if f'"final/{by}"' in words] == bars
    space = wandb_report(report, judged, "me", "cdp")[1]._to_model()
    assert space.display_name == "Runs    1"  # no symbols
    sections = space.spec.section.panel_bank_config.sections
    n_panels = {section.name: len(section.panels) for section in sections}
    expected = {"Accuracy": 6 + 2 * len(bars), "Memory": 5, "Communication": 6}
    assert {name: n_panels[name] for name in expected} == expected


def test_what_was_not_measured_has_no_panels(runs):
    words = json.dumps(
        spec_of(Report("T", EMPTY), [replace(run, ranks=[]) for run in runs])
    )
    assert "measured/" not in words
    assert "schedule/peak_activations" in words


def test_what_panels_show_is_logged():
    """Panels of other names would be empty."""
    keys, numbers = set(), {}
    logged = Tracker()
    logged.on, logged.log = True, lambda values, step=None: keys.update(values)
    logged.config = lambda values: None
    logged.summary = lambda values: numbers.update(values)
    schedule = catalog.cyclic(2)
    track_schedule(logged, schedule)
    track_measured(
        logged, None, [{}], *[simulate(schedule.lower(1), unit_costs(2), UNIT)] * 2
    )
    spec = spec_of(Report("T", EMPTY), [])
    shown = re.findall(r'"((?:schedule|measured)/\w+)"', json.dumps(spec))
    assert {*keys} - {"measured/messages"} <= set(shown) <= keys | {*numbers}
    assert numbers["schedule/peak_activations"] == 1.5
    assert numbers["schedule/staleness_mean"] == 0.25
    assert numbers["measured/step_seconds"] > 0


def test_text_is_no_markup():
    hostile = "a|b <i>*c*</i> [d](javascript:e) `f`\n# g"
    blocks = [
        Text(hostile),
        Table([{hostile: hostile}], hostile),
        Command("run 'x'", "note"),
    ]
    spec = spec_of(Report(hostile, {hostile: blocks}), [])
    text, table = (
        b["content"] for b in spec["blocks"] if b["type"] == "markdown-block"
    )
    caption, heading, line, row = filter(None, table.splitlines())
    escaped = r"a\|b &lt;i&gt;\*c\*&lt;/i&gt; \[d\]\(javascript:e\) \`f\` \# g"
    assert text == caption == escaped
    assert (
        heading.split(" ", 1)[1].strip("| ")
        == row.split(" ", 1)[1].strip("| ")
        == escaped
    )
    assert set(line) <= set("|:-")
    (code,) = (b for b in spec["blocks"] if b["type"] == "code-block")
    assert code["children"][0]["children"][0]["text"] == "run 'x'\n# note"


class Server(BaseHTTPRequestHandler):
    """Answers what the client asks, and keeps it."""

    seen: list = []  # noqa: RUF012
    status = 200

    def log_message(self, *_):
        pass

    def do_GET(self):
        self.answer({})

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.path != "/graphql":
            return self.answer({})
        asked = json.loads(body)
        query, variables = asked["query"], asked.get("variables") or {}
        self.seen.append((query, variables))
        view = {
            "id": "Vmlldzox",
            "type": "runs",
            "name": "n",
            "displayName": "t",
            "spec": "{}",
        }
        view |= {"description": "", "updatedAt": "2026-01-01T00:00:00"}
        view |= {"project": {"id": "1", "name": "cdp", "entityName": "me"}}
        project = {
            "id": "1",
            "name": "cdp",
            "entityName": "me",
            "__typename": "Project",
        }
        user = {"id": "1", "entity": "me", "username": "me", "email": "", "flags": "{}"}
        pages = {"edges": [], "pageInfo": {"endCursor": "", "hasNextPage": False}}
        answers = {
            "upsertView": {"upsertView": {"view": view, "inserted": True}},
            "upsertModel": {
                "result": {"project": project, "model": project, "inserted": True}
            },
            "models": {"models": pages},
            "viewer": {"viewer": user | {"teams": {"edges": []}}},
        }
        found = next((answer for name, answer in answers.items() if name in query), {})
        return self.answer({"data": found})

    def answer(self, content):
        body = json.dumps(content).encode()
        self.send_response(self.status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def server(monkeypatch, tmp_path):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    Server.seen, Server.status = [], 200
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_publishes_report_and_workspace(server, runs, capfd):
    report = build_report(runs, "A title")
    page, space = publish(report, runs, "me", "cdp")
    address = f"http://127.0.0.1:{server.server_port}/me/cdp"
    assert page == f"{address}/reports/A-title--Vmlldzox"
    assert space.startswith(address)
    made = [variables for query, variables in Server.seen if "upsertModel" in query]
    assert made[0]["input"] == {"name": "cdp", "entityName": "me"}
    views = [variables for query, variables in Server.seen if "upsertView" in query]
    names = ("type", "entityName", "projectName", "displayName")
    assert [tuple(view[name] for name in names) for view in views] == [
        ("runs", "me", "cdp", "A title"),
        ("project-view", "me", "cdp", "A title"),
    ]
    blocks = json.loads(views[0]["spec"])["blocks"]
    assert sum(block["type"] == "panel-grid" for block in blocks) == 3
    assert "epoch/top1" in views[1]["spec"]
    assert KEY not in json.dumps(Server.seen)
    said = capfd.readouterr()
    assert KEY not in said.out + said.err

    Server.status = 401
    with pytest.raises(
        UserError, match=r"failed \(.*entity=me and project=cdp"
    ) as found:
        publish(report, runs, "me", "cdp")
    assert KEY not in str(found.value)


@pytest.mark.parametrize(
    ("key", "why"),
    [("", "(No API key|not logged in)"), (KEY, ".*127.0.0.1:1.*connection refused")],
)
def test_without_a_key_or_network_it_is_refused(monkeypatch, tmp_path, key, why):
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("WANDB_API_KEY", key)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("HOME", str(tmp_path))
    wandb.teardown()  # which remembers the keys of earlier tests
    with pytest.raises(UserError, match=rf"publish=wandb failed \({why}"):
        publish(Report("T", {}), [], "me", "cdp")


def test_without_the_package_it_says_how_to_install_it(monkeypatch):
    without_package(monkeypatch, "wandb_workspaces")
    with pytest.raises(UserError, match=r"pip install wandb-workspaces"):
        publish(Report("T", {}), [], "me", "cdp")
