//! The default directories, by the XDG Base Directory rules.

use std::path::PathBuf;

/// Returns Fletch's state directory, which holds the data that must outlive a process.
///
/// It is `/var/lib/fletch` for root, else `$XDG_STATE_HOME/fletch` or `~/.local/state/fletch`. `None` if
/// neither `XDG_STATE_HOME` nor `HOME` is an absolute path.
#[must_use]
pub fn state_dir(root: bool) -> Option<PathBuf> {
    dir(root, "/var/lib/fletch", "XDG_STATE_HOME", ".local/state")
}

/// Returns Fletch's cache directory, whose files may be deleted at any time.
///
/// It is `/var/cache/fletch` for root, else `$XDG_CACHE_HOME/fletch` or `~/.cache/fletch`. `None` as for
/// [`state_dir`].
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
