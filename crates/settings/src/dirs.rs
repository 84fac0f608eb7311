//! Where things are kept, by the XDG rules.

use std::path::PathBuf;

/// Fletch's state directory, for what must outlive a process: `/var/lib/fletch` for root, else
/// `$XDG_STATE_HOME/fletch` or `~/.local/state/fletch`. `None` when neither variable holds an absolute path.
#[must_use]
pub fn state_dir(root: bool) -> Option<PathBuf> {
    dir(root, "/var/lib/fletch", "XDG_STATE_HOME", ".local/state")
}

/// Fletch's cache directory, for what may vanish: `/var/cache/fletch` for root, else `$XDG_CACHE_HOME/fletch`
/// or `~/.cache/fletch`. `None` as for [`state_dir`].
#[must_use]
pub fn cache_dir(root: bool) -> Option<PathBuf> {
    dir(root, "/var/cache/fletch", "XDG_CACHE_HOME", ".cache")
}

fn dir(root: bool, of_root: &str, variable: &str, below_home: &str) -> Option<PathBuf> {
    if root {
        return Some(of_root.into());
    }
    let absolute = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|p| p.is_absolute());
    let base = absolute(variable).or_else(|| absolute("HOME").map(|h| h.join(below_home)));
    base.map(|d| d.join("fletch"))
}
