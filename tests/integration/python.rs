//! The tests of the Python package, run from the built wheel against a real server.

use fletch_tests::bins::{repo, run};
use fletch_tests::python::Installed;
use fletch_tests::require::{Need, have};

fn pytest(args: &[&str]) {
    if have(&[Need::Torch]) {
        Installed::new().pytest(args);
    }
}

#[test]
fn the_client_reads_and_refuses() {
    pytest(&["test_client.py"]);
}

#[test]
fn ranges_are_slices_and_are_checked() {
    pytest(&["test_ranges.py"]);
}

#[test]
fn fsspec_reads_datasets() {
    pytest(&["test_fsspec.py"]);
}

#[test]
fn the_datasets_are_torchvisions() {
    pytest(&["test_datasets.py", "test_evaluation.py", "test_repeatable.py", "test_drafts.py"]);
}

#[test]
fn the_package_is_typed() {
    if !have(&[Need::Torch]) {
        return;
    }
    let installed = Installed::new();
    let mut mypy = installed.command();
    mypy.args(["-m", "mypy", "--no-incremental", "--config-file"]).arg(repo().join("python/pyproject.toml"));
    run(mypy.arg(installed.site().join("fletch")));
    // And it says so when something is not what its types say.
    let wrong = installed.site().join("wrong.py");
    std::fs::write(&wrong, "import fletch\nx: int = fletch.Client('unix:/s').resolve('a').read(0)\n")
        .expect("write");
    let mut mypy = installed.command();
    let said = mypy.args(["-m", "mypy", "--no-incremental", "--strict"]).arg(&wrong).output().expect("mypy");
    let said = String::from_utf8_lossy(&said.stdout).into_owned();
    assert!(said.contains("\"memoryview") && said.contains("Found 1 error"), "{said}");
}

#[test]
fn workers_share_nothing_however_they_are_started() {
    pytest(&["test_processes.py", "-k", "matrix"]);
}

#[test]
fn what_is_killed_leaves_nothing() {
    pytest(&["test_processes.py", "-k", "not matrix"]);
}

#[test]
fn batches_of_workers_share_memory() {
    pytest(&["test_shared_buffers.py"]);
}

#[test]
fn epochs_deliver_once_and_prove_it() {
    pytest(&["test_epochs.py"]);
}

#[test]
fn epochs_need_no_torch() {
    pytest(&["test_without_torch.py"]);
}

#[test]
fn examples_without_torch_that_are_killed_continue() {
    if have(&[Need::Torch]) {
        Installed::new().pytest_of_frameworks(&["test_examples_without_torch.py"]);
    }
}

#[test]
fn wrappers_have_every_sample_or_are_refused() {
    pytest(&["test_wrappers.py"]);
}

#[test]
fn a_rank_belongs_to_one_process() {
    pytest(&["test_loaders.py"]);
}

#[test]
fn examples_that_are_killed_continue() {
    pytest(&["test_examples.py", "-k", "not of_a_framework"]);
}

#[test]
fn examples_of_frameworks_that_are_killed_continue() {
    pytest(&["test_examples.py", "-k", "of_a_framework"]);
}

#[test]
fn what_was_received_outlives_its_server_and_no_loop() {
    pytest(&["test_gone.py", "test_loops.py", "test_device_clock.py"]);
}

#[test]
fn what_a_loop_lets_go_comes_back_at_once() {
    pytest(&["test_releases.py"]);
}
