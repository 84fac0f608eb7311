//! Defaults that depend on the process: its user, its directories, its memory and its host.

use super::Environment;
use fletch_core::MemberId;
use fletch_settings::ByteSize;
use std::path::{Path, PathBuf};

const MEMORY_DEFAULT: u64 = 2 << 30;

/// Returns `root` for root, and for a user `fletch` below the XDG directory or its default.
pub fn directory(e: &Environment, root: &str, xdg: Option<&PathBuf>, below_home: &str) -> String {
    if e.root {
        return root.to_owned();
    }
    let base = xdg.cloned().or_else(|| e.home.as_ref().map(|h| h.join(below_home)));
    base.map_or_else(String::new, |b| show(&b.join("fletch")))
}

fn show(p: &Path) -> String {
    p.display().to_string()
}

pub fn state_dir(e: &Environment) -> String {
    directory(e, "/var/lib/fletch", e.state_home.as_ref(), ".local/state")
}

pub fn socket(e: &Environment) -> String {
    if e.root {
        return "/run/fletch/server.sock".to_owned();
    }
    match &e.runtime_dir {
        Some(dir) => show(&dir.join("fletch/server.sock")),
        None => format!("{}/server.sock", state_dir(e)),
    }
}

pub fn memory(e: &Environment) -> String {
    let half = e.memory_limit.map_or(MEMORY_DEFAULT, |limit| limit / 2);
    ByteSize(half.min(MEMORY_DEFAULT)).to_string()
}

pub fn member_id(e: &Environment) -> String {
    let host = e.host.as_deref().and_then(|host| MemberId::new(host).ok());
    host.unwrap_or_else(MemberId::default_member).to_string()
}
