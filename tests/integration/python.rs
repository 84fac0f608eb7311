//! The Python package: its own tests, run as its users run it, from the built wheel against a real
//! server.

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
fn the_datasets_are_torchvisions() {
    pytest(&["test_datasets.py"]);
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
fn epochs_deliver_once_and_prove_it() {
    pytest(&["test_epochs.py"]);
}
