"""The exercises: the students' notebooks follow from 08_solutions, and their checks judge rightly."""

import contextlib
import io
import os
import re
import subprocess
import sys

import make_exercises
import nbformat
import pytest
from conftest import ROOT
from make_exercises import about

SOURCE = nbformat.read(make_exercises.SOURCE, as_version=4)
TOPICS = make_exercises.topics(SOURCE)
SOLUTIONS = make_exercises.solutions(SOURCE)
PARTS = {"statement", "skeleton", "hint", "solution", "check", "lesson"}

# exercise: (a wrong answer, what the check must say of it) ...
WRONG = {
    "padding_in_the_mean": [
        ("def pool(states, mask):\n    return states.mean(1)", "at its padded positions"),
        (
            "def pool(states, mask):\n    return (states * mask[..., None]).sum(1) / states.shape[1]",
            "divided by",
        ),
        (
            "def pool(states, mask):\n    m = mask[..., None]\n    return (states * m).sum(1) / m.sum(1)",
            "not a number",
        ),
        ("def pool(states, mask):\n    return states.mean(2)", "shape is [2, 5]"),
        ("def pool(states, mask):\n    return states @ mask", "the check stops at RuntimeError"),
    ],
    "left_padding": [
        ("def places(mask):\n    return torch.arange(5).repeat(2, 1)", "does not stand at place 0"),
        ("def places(mask):\n    return mask.cumsum(1)", "0 to T - 1"),
        (
            "def places(mask):\n    return (mask.cumsum(1) - 1).clamp(min=0)",
            "padded on the right",
        ),
    ],
    "padding_makes_dependence": [
        (
            "def divided_by_T(u, counts, T):\n    return u / T\nr2_true = r2_padded = 0.5",
            "come out otherwise",
        ),
        (
            SOLUTIONS["padding_makes_dependence"].replace(
                "return u * counts[:, None] / T", "u *= counts[:, None] / T\n    return u"
            ),
            "restart the kernel",
        ),
        (
            SOLUTIONS["padding_makes_dependence"] + "\nr2_true, r2_padded = r2_padded, r2_true",
            "r2_true",
        ),
    ],
    "normal_equations": [
        (
            SOLUTIONS["normal_equations"].replace("return W, mu_t - W @ mu_S", "return W, mu_t"),
            "mean",
        ),
        (
            SOLUTIONS["normal_equations"].replace("return W,", "return W.T,"),
            "W has the shape [4, 2]",
        ),
        (SOLUTIONS["normal_equations"].replace("/ (len(x) - 1)", ""), "alpha = 0.5"),
        (
            SOLUTIONS["normal_equations"].replace("/ (len(x) - 1)", "/ len(x)"),
            "with the divisor n - 1?",
        ),
        (
            SOLUTIONS["normal_equations"].replace("return W, mu_t - W @ mu_S", "return W"),
            "the pair W, b",
        ),
    ],
    "why_centre": [
        ("theirs, ours = 0.5, 0", "theirs"),
        (SOLUTIONS["why_centre"] + "\nours = theirs", "ours"),
    ],
    "all_groups_from_one_inverse": [
        (SOLUTIONS["all_groups_from_one_inverse"].replace("-np", "np"), "sign"),
        ("def group_weights(P, t, S):\n    return -P[np.ix_(t, S)]", "its own fit"),
        ("def group_weights(P, t, S):\n    return -P[np.ix_(S, t)]", "shape"),
    ],
    "score_from_moments": [
        (
            SOLUTIONS["score_from_moments"].replace(" + scored.n * (drift**2).sum()", ""),
            "own mean is left out",
        ),
        (
            SOLUTIONS["score_from_moments"].replace("(scored.n - 1) * spread", "scored.n * spread"),
            "another sum",
        ),
        (
            "def residual_squares(W, b, scored):\n    return ((scored_t - scored_S @ W.T - b) ** 2).sum()",
            "only the argument scored",
        ),
        (
            SOLUTIONS["score_from_moments"].replace("np.trace", ""),
            "one number is expected, not an array of shape [2, 2]",
        ),
    ],
    "alpha_and_conditioning": [
        (
            "def condition(C, alpha):\n    return np.linalg.cond(C) + alpha\nsmallest_alpha = 1e-4",
            "51 is expected",
        ),
        (
            "def condition(C, alpha):\n    return np.linalg.cond(C), alpha\nsmallest_alpha = 1e-4",
            "one number is expected",
        ),
        (SOLUTIONS["alpha_and_conditioning"] + "\nsmallest_alpha = 1e-3", "smaller power"),
        (SOLUTIONS["alpha_and_conditioning"] + "\nsmallest_alpha = 1e-5", "above a million"),
        (SOLUTIONS["alpha_and_conditioning"] + "\nsmallest_alpha = 5e-5", "no power of ten"),
    ],
    "float32_or_float64": [
        ("covariance = one_pass", "float32, not float64"),
        ("def covariance(x):\n    return one_pass(x).astype(float)", "off by"),
        ("def covariance(x):\n    return np.cov(x.T.astype(float), bias=True)", "divisor is n"),
        (
            "def covariance(x):\n    c = x - x.mean(axis=0)\n    return (c.T @ c / np.float32(len(x) - 1)).astype(float)",
            "off by",
        ),
    ],
    "merging_blocks": [
        (
            "def merge(a, b):\n    return a[0] + b[0], (a[1] + b[1]) / 2, a[2] + b[2]",
            "not of equal size",
        ),
        (
            "def merge(a, b):\n    n = a[0] + b[0]\n    return n, (a[0] * a[1] + b[0] * b[1]) / n, a[2] + b[2]",
            "leaves that out",
        ),
    ],
    "r2_by_hand": [
        ("ssr, sst, r2 = 100, 104, 0.5", "mean of two"),
        ("ssr, sst, r2 = 25, 104, 0.76", "ssr is not"),
        (
            "ssr, sst, r2 = np.array([0, 100]), np.array([4, 100]), np.array([1, 0])",
            "one number is expected, not an array of shape [2]",
        ),
        ("ssr, sst, r2 = 100, 208, 0.52", "sst is not"),
    ],
    "r2_is_not_symmetric": [
        ("A = np.random.default_rng(0).normal(size=(50, 2))\nB = 2 * A", "R² of A on B is 1.000"),
        ("A, B = np.random.default_rng(0).normal(size=(2, 50, 2))", "R² of B on A"),
        ("A = B = np.arange(50.0)", "two axes"),
        ("A = np.eye(20)\nB = A[:, :1]", "so many dimensions"),
    ],
    "n_near_p": [
        ("def noise_r2(n, p):\n    return 0 * n\nenough = 641", "have a mean of"),
        ("def noise_r2(n, p):\n    return p / n\nenough = 641", "centring"),
        (SOLUTIONS["n_near_p"] + "\nenough = 640", "still above"),
        (SOLUTIONS["n_near_p"] + "\nenough = 1000", "fewer rows"),
        (SOLUTIONS["n_near_p"] + "\nenough = 1", "n > p + 1"),
    ],
    "adjusted_r2": [
        ("def adjusted(r2, n, p):\n    return 1 - (1 - r2) * n / (n - p)", "should give 0.25"),
        (
            "def adjusted(r2, n, p):\n    return 1 - (1 - r2) * (n - 1) / (n - p - 1)",
            "nothing to judge by",
        ),
        (
            "def adjusted(r2, n, p):\n"
            "    return max(0, 1 - (1 - r2) * (n - 1) / (n - p - 1)) if n > p + 1 else np.nan",
            "below zero",
        ),
    ],
    "planted_dependence": [
        (
            SOLUTIONS["planted_dependence"].replace("np.sqrt(share)", "share"),
            "share = 0.2: R² of 20,000 rows is",
        ),
        (
            "def plant(n, share, rng):\n    b = rng.normal(size=(n, 1)) * np.ones(5)\n"
            "    return b, np.sqrt(share) * b + np.sqrt(1 - share) * rng.normal(size=(n, 5))",
            "rank",
        ),
        (
            SOLUTIONS["planted_dependence"].replace(
                "    basis, noise", "    rng = np.random.default_rng(0)\n    basis, noise"
            ),
            "draw from rng",
        ),
        (
            SOLUTIONS["planted_dependence"].replace("rng.normal", "np.random.normal"),
            "draw from rng alone",
        ),
        ("def plant(n, share, rng):\n    return rng.normal(size=(n, 5))", "the pair basis, target"),
    ],
    "add_your_own_model": [
        ("def mine(texts):\n    return [len(t) for t in texts]", "not [N, d]"),
        ("def mine(texts):\n    return np.ones((len(texts), 3))", "same vector"),
        (
            "def mine(texts):\n    return np.arange(2.0 * len(texts)).reshape(-1, 2)",
            "other company",
        ),
        (
            "def mine(texts):\n    return np.array([[t.count('q') * 1.0, t.count('zz')] for t in texts])",
            "test R² of bert on your model is",
        ),
    ],
    "break_a_control": [
        ("fit_rows = score_rows = np.arange(len(texts))", "the twin reaches"),
        ("fit_rows = score_rows = np.arange(20)", "fewer than 65"),
        ("fit_rows = score_rows = np.zeros(70, int)", "repeats a row"),
    ],
    "choose_a_smallest_basis": [
        ("smallest, reported = ['distilbert', 'roberta', 'xlnet'], 0.6", "fewer models"),
        ("smallest, reported = ['bert', 'xlnet'], 0.6", "another basis of this size"),
        ("smallest, reported = [n for n in zoo if n != 'albert'], 0.6", "below the best"),
        ("smallest, reported = ['albert'], 1.0", "no candidate"),
        ("smallest, reported = 'albert', 1.0", "no candidate: {'albert'}"),
        (SOLUTIONS["choose_a_smallest_basis"] + "\nreported = max(r2.values())", "not the test R²"),
        ("smallest, reported = [], 0.0", "empty"),
    ],
    "compare_with_cka": [
        (
            SOLUTIONS["compare_with_cka"].replace(
                "np.linalg.norm(c_ab) ** 2", "np.linalg.norm(c_ab)"
            ),
            "should have 1",
        ),
        (SOLUTIONS["compare_with_cka"] + "\ngap = gap[::-1]", "wrong order"),
        (SOLUTIONS["compare_with_cka"] + "\ngap = 'bert', 'bert'", "no pair"),
        (SOLUTIONS["compare_with_cka"] + "\ngap = 'bert'", "no pair"),
    ],
}


def changed(exercise, function, what):
    """The solution of an exercise, `what` made of the result of its function."""
    return f"{SOLUTIONS[exercise]}\n{function} = (lambda f: lambda *a: {what})({function})"


# exercise: right answers of another type, to fewer digits, or that overwrite their arguments
RIGHT = {
    "padding_in_the_mean": [changed("padding_in_the_mean", "pool", "f(*a).tolist()")],
    "left_padding": [
        changed("left_padding", "places", "f(*a).tolist()"),
        changed("left_padding", "places", "f(*a).float()"),
    ],
    "normal_equations": [
        changed("normal_equations", "solve", "[x.tolist() for x in f(*a)]"),
        changed("normal_equations", "solve", "[f(*a), a[0].fill(0), a[1].fill(0)][0]"),
    ],
    "why_centre": ["theirs, ours = 0.990, 0"],
    "all_groups_from_one_inverse": [
        changed("all_groups_from_one_inverse", "group_weights", "f(*a).tolist()")
    ],
    "alpha_and_conditioning": [
        "def condition(C, alpha):\n    C += alpha * np.eye(len(C))\n    return np.linalg.cond(C)\n"
        "smallest_alpha = 1e-4"
    ],
    "float32_or_float64": [changed("float32_or_float64", "covariance", "[f(*a), a[0].fill(0)][0]")],
    "merging_blocks": [changed("merging_blocks", "merge", "list(f(*a))")],
    "r2_by_hand": ["ssr, sst, r2 = 100, 104, 0.038"],
    "planted_dependence": [
        changed("planted_dependence", "plant", "[x.tolist() for x in f(*a)]"),
    ],
}

# exercise: answers that were begun
MISSING = {
    "normal_equations": ["def solve(*_):\n    pass", "def solve(*_):\n    return ..."],
    "merging_blocks": [
        "def merge(*_):\n    pass",
        "def merge(one, other):\n    return one[0] + other[0], (one[1] + other[1]) / 2, ...",
    ],
    "adjusted_r2": ["def adjusted(r2, n, p):\n    1 - (1 - r2) * (n - 1) / (n - p - 1)"],
    "planted_dependence": ["def plant(*_):\n    pass", "def plant(*_):\n    return ..."],
    "compare_with_cka": [SOLUTIONS["compare_with_cka"] + "\ngap = ..., ..."],
}
NOT_YET = "not answered yet (`...` is left, or a function returns nothing)"


def read(topic):
    return nbformat.read(ROOT / "notebooks" / "exercises" / f"{topic}.ipynb", as_version=4)


def run(cells, space):
    """Execute code cells in `space`; {exercise: what its check printed}."""
    said = {}
    for cell in cells:
        if cell.cell_type == "code":
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile(cell.source, cell.id, "exec"), space)
            if about(cell).get("part") == "check":
                said[about(cell)["name"]] = out.getvalue()
    return said


def attempt(notebook, name, answer, space, parts=("given", "skeleton", "check")):
    """What the check of an exercise prints of `answer`."""
    cells = [c.copy() for c in notebook.cells if about(c).get("name") == name]
    own = nbformat.from_dict({"cells": [c for c in cells if about(c)["part"] in parts]})
    return run(make_exercises.filled(own, {name: answer}).cells, space)[name]


@pytest.fixture(scope="module", params=TOPICS)
def tried(request):
    """A topic's notebook as committed, run as it is and then with the solutions; (notebook, said, said, space)."""
    untouched = read(request.param)
    space = {"__name__": "__main__"}
    before = run(untouched.cells, space)
    # what is given (for topic 5 the vectors of six networks) does not depend on answers
    solved = make_exercises.filled(read(request.param), SOLUTIONS)
    kept = [c for c in solved.cells if about(c).get("name") or about(c)["part"] == "last"]
    return untouched, before, run(kept, space), space


def test_there_are_enough_exercises_and_each_is_whole():
    parts = {}
    for cell in SOURCE.cells:
        if name := about(cell).get("name"):
            parts.setdefault(name, []).append(about(cell)["part"])
    assert len(parts) >= 15
    for name, found in parts.items():
        assert set(found) - {"given"} == PARTS, name
    assert set(WRONG) == set(parts)


def test_the_committed_notebooks_follow_from_the_solutions():
    """If not: make exercises, and commit what it writes."""
    folder = ROOT / "notebooks" / "exercises"
    committed = {p.name: p.read_text(encoding="utf-8") for p in folder.glob("*.ipynb")}
    assert committed == make_exercises.all_notebooks(SOURCE)


@pytest.mark.parametrize("topic", TOPICS)
def test_no_solution_reaches_a_student(topic):
    text = "\n".join(c.source for c in read(topic).cells)
    shown = {line.strip() for line in text.splitlines()}
    skeletons = "\n".join(c.source for c in SOURCE.cells if about(c).get("part") == "skeleton")
    for name, code in SOLUTIONS.items():
        own = {line.strip() for line in code.splitlines() if line and line not in skeletons}
        assert own and not own & shown, name
    links = re.findall(r"\]\(([\w./]+)\)", text)
    assert links and all((ROOT / "notebooks" / "exercises" / link).exists() for link in links)


def test_before_every_check_says_politely_that_the_answer_is_missing(tried):
    notebook, before, _, _ = tried
    names = [about(c)["name"] for c in notebook.cells if about(c).get("part") == "check"]
    assert before == {name: f"{name}: {NOT_YET}\n" for name in names}


def test_after_pasting_the_solutions_every_check_says_correct(tried):
    _, before, after, space = tried
    assert after.keys() == before.keys()
    for name, said in after.items():
        assert said.splitlines()[-1] == f"{name}: correct", said
    assert set(space["Check"].verdicts.values()) == {"correct"}


def test_a_wrong_answer_is_told_from_a_missing_one(tried):
    """And what is said names what is off."""
    notebook, before, _, space = tried
    for name in before:
        for answer, expected in WRONG[name]:
            said = attempt(notebook, name, answer, space)
            assert said.startswith(f"{name}: not right yet: "), (answer, said)
            assert expected in said, (answer, said)


def test_another_right_answer_is_correct_and_leaves_the_data_as_they_are(tried):
    notebook, before, _, space = tried
    for name in before:
        for answer in RIGHT.get(name, []):
            said = attempt(notebook, name, answer, space)
            assert said == f"{name}: correct\n", (answer, said)
            said = attempt(notebook, name, SOLUTIONS[name], space, ("skeleton", "check"))
            assert said == f"{name}: correct\n", (answer, said)


def test_an_answer_that_was_begun_is_missing_too(tried):
    notebook, before, _, space = tried
    for name in before:
        for answer in MISSING.get(name, []):
            assert attempt(notebook, name, answer, space) == f"{name}: {NOT_YET}\n", answer


def test_a_check_may_be_repeated_after_all_the_others(tried):
    """A check leaves alone what the exercises before it are given, and their answers."""
    notebook, before, _, space = tried
    for parts in (("given", "skeleton", "check"), ("skeleton", "check"), ("check",)):
        for name in before:
            said = attempt(notebook, name, SOLUTIONS[name], space, parts).splitlines()[-1]
            assert said == f"{name}: correct"


def test_a_notebook_that_was_handed_in_is_marked(tmp_path):
    """Answers count with the cells added beside them; a check that was tampered with does not."""
    submitted = make_exercises.filled(read("4_reading_r2"), {"r2_by_hand": "ssr, sst, r2 = mine()"})
    at = next(i for i, c in enumerate(submitted.cells) if about(c).get("part") == "skeleton")
    helper = "def mine():\n    return 100, 104, 1 - 100 / 104"
    submitted.cells.insert(at, nbformat.v4.new_code_cell(helper))
    for cell in submitted.cells:
        if about(cell).get("part") == "check" and about(cell)["name"] == "n_near_p":
            cell.source = "print('n_near_p: correct')"
        if about(cell).get("part") == "skeleton" and about(cell)["name"] == "adjusted_r2":
            cell.source = "raise ValueError"
    path = tmp_path / "submitted.ipynb"
    nbformat.write(submitted, path)
    command = [sys.executable, "tools/make_exercises.py", "--grade", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = [line.removeprefix("submitted.ipynb: ") for line in done.stdout.splitlines()]
    assert "r2_by_hand: correct" in lines and f"n_near_p: {NOT_YET}" in lines
    assert any(line.startswith("adjusted_r2: not right yet") for line in lines)
    assert lines[-1] == "1 of 5 correct"


@pytest.mark.parametrize(
    "answer, message",
    [
        ("while True:\n    pass", "takes longer than 20 seconds"),
        ("import os\nos._exit(1)", "its code ends the kernel"),
    ],
)
def test_an_answer_that_does_not_end_is_one_line(tmp_path, monkeypatch, answer, message):
    """So that the notebooks after it are marked, too."""
    for name in ("JUPYTER_PATH", "PYTHONPATH", "TOKENIZERS_PARALLELISM", "PYTHONWARNINGS"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    monkeypatch.setattr(make_exercises, "LONGEST", 20)
    path = tmp_path / "submitted.ipynb"
    nbformat.write(make_exercises.filled(read("4_reading_r2"), {"r2_by_hand": answer}), path)
    with pytest.raises(ValueError, match=f"submitted.ipynb: .*{message}") as refused:
        make_exercises.grade(path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "content", ["no notebook", '{"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}']
)
def test_what_is_no_exercise_is_refused_in_one_line(tmp_path, content):
    path = tmp_path / "other.ipynb"
    path.write_text(content)
    with pytest.raises(ValueError, match="other.ipynb: ") as refused:
        make_exercises.grade(path)
    assert "\n" not in str(refused.value)
