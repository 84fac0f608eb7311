//! `docs/SEMANTICS.md`, executed: every block tagged `sh semantics` exits 0 on a mounted tree.

use crate::support::dataset::{Dataset, Node, noise};
use crate::support::kernel::{Mount, can_mount};
use crate::support::stub::Stub;
use std::{fs, path::Path, process::Command, sync::Arc};

fn blocks(text: &str) -> Vec<(usize, String)> {
    let mut out = Vec::new();
    let mut open: Option<(usize, String)> = None;
    for (i, line) in text.lines().enumerate() {
        match (&mut open, line.trim()) {
            (None, "```sh semantics") => open = Some((i + 1, String::new())),
            (Some(_), "```") => out.extend(open.take()),
            (Some((_, block)), _) => {
                block.push_str(line);
                block.push('\n');
            }
            (None, _) => {}
        }
    }
    out
}

/// Returns a tree with one example of everything that the page describes.
fn known_tree() -> Dataset {
    let text = |s: &str| Node::File(s.to_owned().into());
    let link = |s: &str| Node::Symlink(s.to_owned());
    let nodes = [
        ("README.txt", text("a small file\n")),
        ("empty", text("")),
        ("a/b/c/deep.bin", Node::File(noise(1, 300_000))),
        ("a/one.jpg", Node::File(noise(2, 110_000))),
        ("a/two.jpg", Node::File(noise(3, 128 << 10))),
        ("big.bin", Node::File(noise(4, 9_500_000))),
        ("odd names/with space", text("1")),
        ("odd names/x#1", text("2")),
        ("odd names/é", text("3")),
        ("odd names/-dash", text("4")),
        ("void", Node::EmptyDir),
        ("a/link", link("../README.txt")),
        ("dangling", link("nowhere")),
        ("run.sh", text("#!/bin/sh\necho ran\n")),
    ];
    Dataset::build(nodes.into_iter().map(|(p, n)| (p.to_owned(), n)).collect())
}

#[test]
fn every_statement_holds() {
    if !can_mount() {
        return;
    }
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/SEMANTICS.md");
    let blocks = blocks(&fs::read_to_string(page).expect("docs/SEMANTICS.md"));
    assert!(blocks.len() >= 15, "only {} blocks", blocks.len());
    let dataset = Arc::new(known_tree());
    let stub = Stub::start(Arc::clone(&dataset));
    let mount = Mount::start(&stub.url(), &[]);
    for (line, block) in blocks {
        // Under `set -e` a failing `! x`, or the first half of `x && y`, does not fail the block.
        let mute = |l: &str| l.starts_with("! ") || (l.contains(" && ") && !l.contains("$3 =="));
        assert!(!block.lines().any(mute), "SEMANTICS.md:{line}: a line that cannot fail\n{block}");
        let out = Command::new("bash")
            .args(["-euo", "pipefail", "-c", &block])
            .env("MNT", mount.path())
            .env("SRC", dataset.src.path())
            .env("ROOT", dataset.root.to_string())
            .output()
            .expect("bash");
        assert!(
            out.status.success(),
            "SEMANTICS.md:{line}: {}\n{block}\n{}{}",
            out.status,
            String::from_utf8_lossy(&out.stdout),
            String::from_utf8_lossy(&out.stderr)
        );
    }
}
