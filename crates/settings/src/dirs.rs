//! Where things that must outlive a process are kept, by the XDG rules.

use std::path::PathBuf;

/// Fletch's state directory: `/var/lib/fletch` for root, else `$XDG_STATE_HOME/fletch` or
/// `~/.local/state/fletch`. `None` when neither variable holds an absolute path.
#[must_use]
pub fn state_dir(root: bool) -> Option<PathBuf> {
    if root {
        return Some("/var/lib/fletch".into());
    }
    let absolute = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|p| p.is_absolute());
    let state = absolute("XDG_STATE_HOME").or_else(|| absolute("HOME").map(|h| h.join(".local/state")));
    state.map(|d| d.join("fletch"))
}
