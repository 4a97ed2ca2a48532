"""What is built for an index: tags, metadata and what the sdist holds."""

import email
import re
import shutil
import subprocess
import tarfile
import zipfile

import pytest

from jagcodec import __version__
from tests.helpers import ROOT, run_python

REPOSITORY = "https://github.com/jagcodec/jagcodec"
pytest.importorskip("setuptools", minversion="77")


@pytest.fixture
def source(tmp_path):
    """A copy of what a wheel is built from, without anything that was built."""
    copied = tmp_path / "source"
    copied.mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, copied)
    built = shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", copied / "src", ignore=built)
    return copied


def build(hook, source, out, status=0, **environment):
    """Run a hook of the build backend in a process of its own, as pip does."""
    out.mkdir()
    code = f"from setuptools import build_meta; print('made', build_meta.{hook}({str(out)!r}))"
    return run_python(code, cwd=source, status=status, **{"PYTHONPATH": "", **environment})


@pytest.mark.parametrize(
    ("required", "said"),
    [("1", "_kernel.c"), ("yes", "JAGCODEC_REQUIRE_COMPILED: expected 0 or 1, found 'yes'")],
)
def test_a_build_that_has_to_be_compiled_fails_without_a_compiler(source, tmp_path, required, said):
    how = {"CC": "false", "JAGCODEC_REQUIRE_COMPILED": required}
    assert said in build("build_wheel", source, tmp_path / "out", status=1, **how).stderr
    assert list((tmp_path / "out").iterdir()) == []


def test_a_wheel_without_c_is_one_for_every_platform(source, tmp_path):
    build("build_wheel", source, tmp_path / "out", CC="false")
    assert_pure(tmp_path / "out")


def assert_pure(folder):
    (wheel,) = folder.iterdir()
    assert wheel.name == f"jagcodec-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as opened:
        names = opened.namelist()
        tags = opened.read(f"jagcodec-{__version__}.dist-info/WHEEL").decode()
    assert not [name for name in names if name.endswith((".so", ".c"))]
    assert {"jagcodec/py.typed", "jagcodec/kernels/_kernel.pyi"} <= set(names)
    assert "Root-Is-Purelib: true\nTag: py3-none-any\n" in tags


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_one_wheel_is_for_every_python_and_a_later_one_without_c_has_nothing_of_it(
    source, tmp_path
):
    build("build_wheel", source, tmp_path / "out", JAGCODEC_REQUIRE_COMPILED="1")
    (wheel,) = (tmp_path / "out").iterdir()
    assert wheel.name.startswith(f"jagcodec-{__version__}-cp311-abi3-")
    names = zipfile.ZipFile(wheel).namelist()
    assert {"jagcodec/kernels/_cells.abi3.so", "jagcodec/kernels/_kernel.abi3.so"} <= set(names)
    # What this build left in build/ must not get into the next one.
    assert list(source.glob("build/lib*/jagcodec/kernels/_kernel.abi3.so"))
    build("build_wheel", source, tmp_path / "pure", CC="false")
    assert_pure(tmp_path / "pure")


def test_links_and_pictures_of_the_index_page_are_absolute_and_lead_somewhere(source, tmp_path):
    build("prepare_metadata_for_build_wheel", source, tmp_path / "metadata")
    (file,) = (tmp_path / "metadata").glob("*/METADATA")
    metadata = email.message_from_string(file.read_text())
    assert metadata["Description-Content-Type"] == "text/markdown"
    page = str(metadata.get_payload())
    targets = re.findall(r"\]\(([^)]+)\)|(?:src|href)=\"([^\"]+)\"", page)
    assert len(targets) > 10
    for target in (either or other for either, other in targets):
        assert re.match(r"https://|#", target), target
        ours = re.match(rf"{REPOSITORY}/(?:raw|blob)/v{__version__}/([^#]+)", target)
        assert not target.startswith(REPOSITORY) or (ours and (ROOT / ours[1]).exists()), target
    for picture in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", page):
        assert f"{REPOSITORY}/raw/" in picture
    # Nothing else of it is changed.
    back = re.sub(rf"\({REPOSITORY}/(?:raw|blob)/v{__version__}/", "(", page)
    assert back.strip() == (ROOT / "README.md").read_text().strip()


def test_the_sdist_holds_every_file_of_the_checkout(tmp_path):
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode or not (ROOT / ".git").exists():  # an sdist may lie in a checkout
        pytest.skip("not a git checkout")
    tracked = set(listed.stdout.split("\n")) - {""}
    for name in tracked:
        if (ROOT / name).exists():
            (tmp_path / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / "source" / name)
    build("build_sdist", tmp_path / "source", tmp_path / "out")
    (sdist,) = (tmp_path / "out").iterdir()
    with tarfile.open(sdist) as opened:
        held = {name.partition("/")[2] for name in opened.getnames()}
    assert tracked - held == set()
    assert not [name for name in held if name.endswith((".so", ".pyc"))]


@pytest.mark.parametrize(
    ("package", "module", "name"),
    [
        ("tensordict", "tensordict._td", "_SubTensorDict"),
        ("torch", "torch.nested._internal.nested_tensor", "NestedTensor"),
    ],
)
def test_a_version_without_a_private_name_fails_in_one_sentence(package, module, name):
    code = f"import torch, tensordict, {module} as m; del m.{name}; import jagcodec; "
    run = run_python(code + "jagcodec.decode", status=1)
    *_, last = run.stderr.splitlines()
    assert re.match(
        rf"ImportError: jagcodec needs private names of {package}, one of which {package} \S+ "
        rf"lacks \(cannot import name '{name}'.*\); install .*: pip install '{package}==[\d.]+'",
        last,
    )


def test_the_source_and_the_wheel_name_one_python():
    source = (ROOT / "src/jagcodec/kernels/_kernel.c").read_text()
    (version,) = re.findall(r"#define Py_LIMITED_API 0x(..)(..)0000\n", source)
    major, minor = (int(digits, 16) for digits in version)
    assert f'"cp{major}{minor}"' in (ROOT / "setup.py").read_text()
    assert f'requires-python = ">={major}.{minor}"' in (ROOT / "pyproject.toml").read_text()


def test_the_workflow_runs_the_steps_of_ci_run():
    script = (ROOT / ".ci" / "run").read_text()
    local, elsewhere = re.findall(r'^(?:LOCAL|ELSEWHERE)="(.*)"$', script, re.M)
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    listed = re.findall(r"^          - ([\w.-]+)$", workflow, re.M)
    nightly = re.findall(r"run: \.ci/run (\w+)$", workflow, re.M)
    assert [*listed, *nightly] == [*local.split(), *elsewhere.split()]
    assert re.findall(r"^    ([\w.-]+)\)", script, re.M) == [*listed, *nightly]
