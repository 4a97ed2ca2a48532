"""The hook of Ray's workers: in processes of its own, and in those of a real Ray."""

import importlib.util
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import jagcodec
from jagcodec import stack_or_nest

SOURCE = str(Path(jagcodec.__file__).parents[1])
SECONDS = 120
WITH_RAY = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None,
    reason="Ray is not installed",
)
WITH_VERL = pytest.mark.skipif(
    importlib.util.find_spec("verl") is None, reason="verl is not installed: see docs/verl.md"
)

# What a process may print, in one line of JSON at its end.
TOOLS = """
import json, sys
from jagcodec.integrations import setup

def show(*values):
    print(json.dumps(values))

def waited():
    return sorted(n for f in sys.meta_path for n in getattr(f, "names", ()))

def registered():
    dispatch = sys.modules["ray.cloudpickle"].CloudPickler.dispatch
    wanted = ("TensorDict", "LazyStackedTensorDict", "NestedTensor", "BatchedDataDict")
    names = {cls.__name__ for cls in dispatch}
    return sorted(names & {*wanted, "WireBatch", "DataProto"})
"""
OF_TENSORDICT = ["LazyStackedTensorDict", "NestedTensor", "TensorDict"]


def python(code, tmp_path, **environment):
    """What a new process shows; it finds the modules of `tmp_path` before others."""
    paths = [str(tmp_path), SOURCE, os.environ.get("PYTHONPATH", "")]
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", TOOLS + textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **environment},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


def package(tmp_path, name, source):
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text(textwrap.dedent(source))


class TestCost:
    def test_it_imports_nothing_heavy(self, tmp_path):
        code = """
        setup()
        heavy = ("torch", "numpy", "tensordict", "ray", "verl", "msgpack")
        show([name for name in heavy if name in sys.modules])
        """
        assert python(code, tmp_path) == [[]]

    def test_it_imports_little_else(self, tmp_path):
        """Two modules of this library, and those of the standard library that they name."""
        code = """
        show(sorted(name for name in sys.modules if name.startswith("jagcodec")))
        """
        assert python(code, tmp_path) == [
            [
                *("jagcodec", "jagcodec._version", "jagcodec.errors"),
                *("jagcodec.integrations", "jagcodec.integrations._reducers"),
            ]
        ]


@WITH_RAY
class TestRegistration:
    @pytest.mark.parametrize("name", ["tensordict", "tensordict.nn"])
    def test_when_tensordict_is_imported(self, tmp_path, name):
        code = f"""
        import ray
        setup()
        before = registered()
        import {name}
        show(before, registered(), "jagcodec.integrations.ray" in sys.modules)
        """
        assert python(code, tmp_path) == [[], OF_TENSORDICT, False]

    def test_at_once_if_it_is_imported(self, tmp_path):
        code = """
        import ray, tensordict
        setup()
        show(registered())
        """
        assert python(code, tmp_path) == [OF_TENSORDICT]

    def test_when_ray_is_imported_later(self, tmp_path):
        code = """
        setup()
        import tensordict
        assert "ray" not in sys.modules
        import ray
        show(registered())
        """
        assert python(code, tmp_path) == [OF_TENSORDICT]

    def test_types_of_this_library_when_they_are_imported(self, tmp_path):
        code = """
        import ray, jagcodec
        setup()
        jagcodec.WireBatch
        show(registered(), waited())
        """
        later = ["jagcodec.batch.batched_data_dict", "verl.protocol"]
        assert python(code, tmp_path) == [[*OF_TENSORDICT, "WireBatch"], later]

    def test_the_first_import_may_be_that_of_a_reader(self, tmp_path):
        """It imports tensordict in its turn, while it is itself being imported."""
        code = """
        import ray, pickle
        setup()
        import jagcodec.integrations.ray
        import torch, tensordict
        td = tensordict.TensorDict({"a": torch.arange(3)}, batch_size=[3])
        written = ray.cloudpickle.dumps(td)
        show(b"jagcodec.integrations.ray" in written, pickle.loads(written)["a"].tolist())
        """
        assert python(code, tmp_path) == [True, [0, 1, 2]]

    def test_threads_that_import_at_the_same_time(self, tmp_path):
        code = """
        import importlib, ray, threading
        setup()
        names = ["tensordict", "jagcodec.integrations.ray", "tensordict.nn"]
        names.append("jagcodec.wire.wire_batch")
        together, failed = threading.Barrier(len(names)), []

        def work(name):
            together.wait()
            try:
                importlib.import_module(name)
            except BaseException as error:
                failed.append(repr(error))

        threads = [threading.Thread(target=work, args=(name,)) for name in names]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        show(failed, registered())
        """
        every = ["BatchedDataDict", *OF_TENSORDICT, "WireBatch"]
        assert python(code, tmp_path) == [[], every]

    @WITH_VERL
    def test_dataproto_and_then_every_type_by_the_reader_of_verl(self, tmp_path):
        code = """
        import ray
        from ray.cloudpickle import dumps, loads
        setup()
        import tensordict, torch
        td = tensordict.TensorDict({"a": torch.arange(3)}, batch_size=[3])
        first = dumps(td)
        import verl
        data = loads(dumps(verl.DataProto(batch=td, meta_info={"step": 3})))
        show(
            [b"integrations.verl" in written for written in (first, dumps(td), dumps(data))],
            registered(),
            [repr(finder) for finder in sys.meta_path if "jagcodec" in repr(finder)],
            data.batch["a"].tolist(),
            data.meta_info,
        )
        """
        every = ["BatchedDataDict", "DataProto", *OF_TENSORDICT, "WireBatch"]
        assert python(code, tmp_path) == [
            [False, True, True],
            every,
            [],
            [0, 1, 2],
            {"step": 3},
        ]

    def test_twice_is_once(self, tmp_path):
        code = """
        import ray, tensordict
        setup()
        finders = list(sys.meta_path)
        setup()
        show(sys.meta_path == finders, registered())
        """
        assert python(code, tmp_path) == [True, OF_TENSORDICT]

    def test_unregister_undoes_it(self, tmp_path):
        code = """
        import copyreg, ray
        setup()
        import jagcodec.integrations.ray as integration
        integration.unregister()
        dispatch = ray.cloudpickle.CloudPickler.dispatch
        pythons = [copyreg.dispatch_table.get(cls) for cls in integration.BY_DEFAULT]
        undone = [dispatch.get(cls) for cls in integration.BY_DEFAULT] == pythons
        still = waited()
        setup()
        again = [dispatch.get(cls) for cls in integration.BY_DEFAULT] != pythons
        show(undone, still, again)
        """
        assert python(code, tmp_path) == [True, [], True]

    def test_options_of_the_user_are_kept(self, tmp_path):
        """Those of a call before the hook, and of one after it."""
        code = """
        import pathlib, ray
        from ray.cloudpickle import dumps, loads
        import jagcodec
        batch = jagcodec.BatchedDataDict({"path": [pathlib.Path("/a")]})
        import jagcodec.integrations.ray as integration
        integration.register(allow_pickle=True)
        setup()
        first = loads(dumps(batch)) == batch
        integration.unregister()
        setup()
        try:
            dumps(batch)
        except TypeError as error:
            refused = "cannot be encoded" in str(error)
        integration.register(allow_pickle=True)
        show(first, refused, loads(dumps(batch)) == batch)
        """
        assert python(code, tmp_path) == [True, True, True]


class TestImports:
    def test_an_error_of_the_module_passes_unchanged(self, tmp_path):
        package(
            tmp_path,
            "tensordict",
            """
            import sys
            if not hasattr(sys, "ready"):
                import no_such_library
            class TensorDict: pass
            class LazyStackedTensorDict: pass
            """,
        )
        code = """
        setup()
        try:
            import tensordict
        except ModuleNotFoundError as error:
            first = [str(error), error.name, str(error.__cause__), "tensordict" in sys.modules]
        still = "tensordict" in waited()
        sys.ready = True
        import tensordict
        show(first, still, "tensordict" in waited())
        """
        assert python(code, tmp_path) == [
            ["No module named 'no_such_library'", "no_such_library", "None", False],
            True,
            False,
        ]

    def test_a_module_that_is_not_installed(self, tmp_path):
        code = """
        sys.path[:] = [path for path in sys.path if "packages" not in path]
        setup()
        try:
            import tensordict
        except ModuleNotFoundError as error:
            show(str(error), error.name)
        """
        assert python(code, tmp_path) == ["No module named 'tensordict'", "tensordict"]

    def test_a_version_without_a_type_is_named_with_the_hook(self, tmp_path):
        package(tmp_path, "tensordict", "__version__ = '9.9'\nclass TensorDict: pass")
        code = """
        setup()
        found = []
        for _ in range(2):  # the second import fails likewise
            try:
                import tensordict
            except Exception as error:
                found.append([isinstance(error, ImportError), type(error).__name__, str(error)])
        show(*found)
        """
        first, second = python(code, tmp_path)
        assert first == second
        assert first[:2] == [False, "ArgumentError"]
        assert first[2].startswith("jagcodec.integrations.setup: expected to register the types")
        assert "version (9.9)" in first[2]
        assert "'tensordict' has no attribute 'LazyStackedTensorDict'" in first[2]

    def test_the_same_if_it_is_imported_already(self, tmp_path):
        package(tmp_path, "tensordict", "class TensorDict: pass")
        code = """
        import tensordict
        try:
            setup()
        except Exception as error:
            show(type(error).__name__, str(error))
        """
        name, text = python(code, tmp_path)
        assert name == "ArgumentError"
        assert text.startswith("jagcodec.integrations.setup: expected to register the types")

    def test_the_module_has_its_own_loader(self, tmp_path):
        package(
            tmp_path,
            "tensordict",
            """
            from importlib.machinery import SourceFileLoader
            during = type(__loader__) is SourceFileLoader is type(__spec__.loader)
            class TensorDict: pass
            class LazyStackedTensorDict: pass
            """,
        )
        code = """
        import importlib.util
        setup()
        spec = importlib.util.find_spec("tensordict")
        source = spec.loader.get_source("tensordict")
        assert "tensordict" not in sys.modules
        import tensordict
        after = type(tensordict.__loader__) is type(tensordict.__spec__.loader)
        show(
            "class TensorDict" in source,
            tensordict.during,
            after and type(tensordict.__loader__).__name__,
            importlib.reload(tensordict) is tensordict,
        )
        """
        assert python(code, tmp_path) == [True, True, "SourceFileLoader", True]

    @pytest.mark.parametrize("place", [0, 1], ids=["before", "after"])
    def test_next_to_another_hook(self, tmp_path, place):
        """One that asks all other finders, and wraps the loader as well."""
        package(
            tmp_path,
            "tensordict",
            "class TensorDict: pass\nclass LazyStackedTensorDict: pass",
        )
        code = f"""
        ran = []

        class Theirs:
            busy = False

            def find_spec(self, name, path=None, target=None):
                if name != "tensordict" or self.busy:
                    return None
                self.busy = {place == 1}  # a hook before this one would ask it for ever
                others = [finder for finder in sys.meta_path if finder is not self]
                found = (finder.find_spec(name, path, target) for finder in others)
                spec = next(spec for spec in found if spec is not None)
                self.busy = False
                execute = spec.loader.exec_module
                spec.loader.exec_module = lambda module: (execute(module), ran.append(name))
                return spec

        setup()
        sys.meta_path.insert({place}, Theirs())
        import tensordict
        show(ran, "tensordict" in waited())
        """
        assert python(code, tmp_path) == [["tensordict"], False]


HOOKS = """
calls = []

def hook():
    calls.append(1)

def again():
    from jagcodec.integrations import setup
    calls.append(1)
    setup()

def fails():
    raise KeyError("of the hook")

number = 3
"""


class TestNextHook:
    @pytest.fixture(autouse=True)
    def hooks(self, tmp_path):
        (tmp_path / "hooks.py").write_text(HOOKS)
        (tmp_path / "broken.py").write_text("import no_such_library\ndef hook(): ...")

    @pytest.mark.parametrize("name", ["hook", "again"])
    def test_it_is_called_once(self, tmp_path, name):
        code = """
        setup()
        setup()
        import hooks
        show(hooks.calls)
        """
        assert python(code, tmp_path, JAGCODEC_NEXT_HOOK=f"hooks.{name}") == [[1]]

    def test_without_one_or_an_empty_one(self, tmp_path):
        assert python("setup(); show('ok')", tmp_path, JAGCODEC_NEXT_HOOK="") == ["ok"]

    @pytest.mark.parametrize(
        ("name", "found"),
        [
            ("hook", "found 'hook'"),
            ("hooks.", "found 'hooks.'"),
            (".hooks.hook", "found '.hooks.hook'"),
            ("hooks:hook", "found 'hooks:hook'"),
            ("nowhere.hook", "found no module 'nowhere' for 'nowhere.hook'"),
            ("hooks.inner.hook", "found no module 'hooks.inner' for 'hooks.inner.hook'"),
            ("hooks.nothing", "found no 'nothing' in the module 'hooks'"),
            ("hooks.number", "found 'hooks.number', a int, which is not callable"),
        ],
    )
    def test_a_name_of_no_function_is_named(self, tmp_path, name, found):
        code = """
        from jagcodec import ArgumentError
        try:
            setup()
        except ArgumentError as error:
            show(error.reason, str(error))
        """
        reason, text = python(code, tmp_path, JAGCODEC_NEXT_HOOK=name)
        assert reason == "bad_option"
        assert text.startswith("jagcodec.integrations.setup(JAGCODEC_NEXT_HOOK): expected module.f")
        assert f", {found}; set" in text

    @pytest.mark.parametrize(
        ("name", "kind"), [("hooks.fails", "KeyError"), ("broken.hook", "ModuleNotFoundError")]
    )
    def test_its_own_error_passes_with_a_note(self, tmp_path, name, kind):
        code = """
        found = []
        for _ in range(2):  # it is called again if it failed
            try:
                setup()
            except Exception as error:
                found.append([type(error).__name__, error.__notes__])
        show(*found)
        """
        note = f"raised by JAGCODEC_NEXT_HOOK='{name}', which jagcodec.integrations.setup called"
        assert python(code, tmp_path, JAGCODEC_NEXT_HOOK=name) == [[kind, [note]]] * 2

    @WITH_RAY
    def test_ray_shows_all_of_it(self, tmp_path):
        """In the logs of the worker, and in the terminal of the job."""
        code = """
        from ray._private.runtime_env.setup_hook import load_and_execute_setup_hook
        show(load_and_execute_setup_hook("jagcodec.integrations.setup"))
        """
        (told,) = python(code, tmp_path, JAGCODEC_NEXT_HOOK="hooks.nothing")
        assert "jagcodec.integrations.setup(JAGCODEC_NEXT_HOOK): expected module.function" in told
        (told,) = python(code, tmp_path, JAGCODEC_NEXT_HOOK="hooks.fails")
        assert "KeyError: 'of the hook'\nraised by JAGCODEC_NEXT_HOOK='hooks.fails'" in told


# --- in the workers of a real Ray ----------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    ray = pytest.importorskip("ray")
    folder = tmp_path_factory.mktemp("hooks")
    (folder / "hooks.py").write_text(HOOKS)
    paths = [SOURCE, str(folder), os.environ.get("PYTHONPATH", "")]
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=100 * 2**20,
        runtime_env={
            "worker_process_setup_hook": "jagcodec.integrations.setup",
            "env_vars": {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        },
    )
    yield ray
    ray.shutdown()


def next_hook(name):
    return {"env_vars": {"JAGCODEC_NEXT_HOOK": f"hooks.{name}"}}


@pytest.mark.cluster
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning")
class TestWorkers:
    def test_one_that_imports_nothing_has_nothing(self, cluster):
        @cluster.remote
        def loaded():
            import sys

            heavy = ("torch", "numpy", "tensordict", "verl", "jagcodec.wire", "jagcodec.memory")
            return [name for name in heavy if name in sys.modules], "jagcodec" in sys.modules

        assert cluster.get(loaded.remote(), timeout=SECONDS) == ([], True)

    def test_one_that_imports_tensordict_sends_nested_columns_in_this_wire_format(self, cluster):
        """Equal rows share their offsets only there."""

        @cluster.remote
        def make():
            import sys

            before = "torch" in sys.modules
            import torch
            from tensordict import TensorDict

            columns = {
                name: torch.nested.nested_tensor(
                    [torch.full((2,), 1.5), torch.full((3,), 2.5)], layout=torch.jagged
                )
                for name in "ab"
            }
            return TensorDict(columns, batch_size=[2]), before

        # In a process of its own, which imported nothing before.
        options = {"runtime_env": {"env_vars": {"JAGCODEC_TEST": "a new worker"}}}
        found, before = cluster.get(make.options(**options).remote(), timeout=SECONDS)
        assert not before
        assert found["a"].offsets() is found["b"].offsets()
        assert [row.tolist() for row in found["b"].unbind()] == [[1.5] * 2, [2.5] * 3]

    def test_one_that_is_sent_a_batch_first_sends_one_too(self, cluster):
        from tensordict import TensorDict

        from jagcodec.integrations import ray as integration

        @cluster.remote
        def back(td):
            td["b"] = td["a"] * 2
            return td

        rows = [torch.ones(2), torch.ones(1)]
        td = TensorDict({"a": stack_or_nest(rows, always_nest=True)}, batch_size=[2])
        integration.register()
        try:
            options = {"runtime_env": {"env_vars": {"JAGCODEC_TEST": "another new worker"}}}
            found = cluster.get(back.options(**options).remote(td), timeout=SECONDS)
        finally:
            integration.unregister()
        assert found["a"].offsets() is found["b"].offsets()
        assert [row.tolist() for row in found["b"].unbind()] == [[2.0, 2.0], [2.0]]

    @WITH_VERL
    def test_one_that_imports_verl_sends_dataprotos_in_this_wire_format(self, cluster):
        @cluster.remote
        def make():
            import torch
            from ray import cloudpickle
            from verl import DataProto

            data = DataProto.from_dict(
                tensors={"ids": torch.arange(6).view(2, 3)}, meta_info={"step": 3}
            )
            return data, b"jagcodec.integrations.verl" in cloudpickle.dumps(data)

        found, here = cluster.get(make.remote(), timeout=SECONDS)
        assert here
        assert found.batch["ids"].tolist() == [[0, 1, 2], [3, 4, 5]]
        assert found.meta_info == {"step": 3}

    def test_the_next_hook_is_called(self, cluster):
        @cluster.remote(runtime_env=next_hook("hook"))
        def calls():
            return importlib.import_module("hooks").calls

        assert cluster.get(calls.remote(), timeout=SECONDS) == [1]

    def test_a_bad_next_hook_ends_the_worker(self, cluster):
        @cluster.remote(max_retries=0, runtime_env=next_hook("nothing"))
        def calls():
            return 1

        with pytest.raises(cluster.exceptions.WorkerCrashedError):
            cluster.get(calls.remote(), timeout=SECONDS)
