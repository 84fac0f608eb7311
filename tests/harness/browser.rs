//! A real browser that looks at the admin page (`tests/page/look.mjs`).

use crate::{
    bins::{repo, run},
    python::servers,
};
use serde_json::Value;
use std::{path::PathBuf, process::Command};

/// Returns the folder into which `tests/install.sh` installed what the page takes from npm.
#[must_use]
pub fn modules() -> PathBuf {
    servers().join("page/node_modules")
}

/// Looks at a page, once for each object of a list. Returns what the browser saw.
///
/// # Panics
/// If the browser does not start, or a look does not find what it waits for.
#[must_use]
pub fn look(looks: &Value) -> Vec<Value> {
    let mut c = Command::new("node");
    c.arg(repo().join("tests/page/look.mjs")).arg(looks.to_string()).env("FLETCH_PAGE_MODULES", modules());
    let out = run(&mut c).stdout;
    let seen: Vec<Value> =
        serde_json::from_slice(&out).unwrap_or_else(|e| panic!("{e}: {}", String::from_utf8_lossy(&out)));
    for (asked, seen) in looks.as_array().into_iter().flatten().zip(&seen) {
        assert!(seen["failed"].is_null(), "{asked}: {}", seen["failed"].as_str().unwrap_or_default());
    }
    seen
}
