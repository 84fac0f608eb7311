//! One directory of `local.dirs`: `DIR`, or `DIR=DOMAIN,DOMAIN`, or `DIR=*`.

use fletch_core::Domain;
use fletch_origin::OriginUri;
use std::path::{Path, PathBuf};

/// The word for every domain.
pub const EVERY_DOMAIN: &str = "*";

/// A directory under which datasets may be registered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LocalDir {
    /// The directory as the settings name it, absolute.
    pub named: PathBuf,
    /// The directory itself, all links followed.
    pub real: PathBuf,
    /// The domains that may read it; `*` stands for every domain. Empty: those that `[[origin]]` allows
    /// without `domains`.
    pub domains: Vec<String>,
}

impl LocalDir {
    /// Reads an item of the list. The last `=` begins the domains. Asks the file system for the real path.
    ///
    /// # Errors
    /// A text that says what is wrong with the item.
    pub fn read(item: &str) -> Result<Self, String> {
        let (dir, domains) = item.rsplit_once('=').unwrap_or((item, ""));
        let domains: Vec<String> = domains.split(',').filter(|d| !d.is_empty()).map(str::to_owned).collect();
        check_domains(&domains)?;
        let real = std::fs::canonicalize(dir).map_err(|e| {
            let hint = if item.contains('=') {
                "; a `=` in a directory's name needs a `=` after the name"
            } else {
                ""
            };
            format!("cannot use {dir}: {e}; create it, or remove it from the list{hint}")
        })?;
        OriginUri::local(&real).map_err(|e| e.to_string())?;
        let named = std::path::absolute(dir).unwrap_or_else(|_| Path::new(dir).to_owned());
        Ok(LocalDir { named, real, domains })
    }
}

impl LocalDir {
    /// Returns a directory of the server itself, for every domain of a server without tokens.
    ///
    /// # Errors
    /// The system's error.
    pub fn own(dir: &Path) -> std::io::Result<Self> {
        let real = std::fs::canonicalize(dir)?;
        Ok(LocalDir { named: dir.to_owned(), real, domains: Vec::new() })
    }
}

/// Checks the names of domains. `*` stands alone.
///
/// # Errors
/// A text with the name that is wrong.
pub fn check_domains(domains: &[String]) -> Result<(), String> {
    if domains.iter().any(|d| d == EVERY_DOMAIN) {
        let alone = domains.len() == 1;
        return if alone { Ok(()) } else { Err("`*` stands for every domain; remove the others".to_owned()) };
    }
    for domain in domains {
        Domain::new(domain).map_err(|e| format!("{domain:?} is not the name of a domain: {e}"))?;
    }
    Ok(())
}

/// Returns whether a list of domains has a domain. `open` is the answer for an empty list.
#[must_use]
pub fn lists(domains: &[String], domain: &Domain, open: bool) -> bool {
    if domains.is_empty() { open } else { domains.iter().any(|d| d == EVERY_DOMAIN || d == domain.as_str()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_may_name_its_domains() {
        let dir = tempfile::tempdir().expect("tempdir");
        let real = std::fs::canonicalize(dir.path()).expect("real");
        std::fs::create_dir(real.join("a=b")).expect("mkdir");
        std::os::unix::fs::symlink(&real, real.join("link")).expect("symlink");
        let read = |item: String| LocalDir::read(&item);
        let top = real.display().to_string();
        let plain = read(top.clone()).expect("plain");
        assert_eq!((plain.real.as_path(), plain.domains.len()), (real.as_path(), 0));
        assert_eq!(read(format!("{top}=x,y")).expect("two").domains, ["x", "y"]);
        assert_eq!(read(format!("{top}=*")).expect("all").domains, ["*"]);
        let odd = read(format!("{top}/a=b=")).expect("a `=` in the name");
        assert_eq!((odd.real, odd.domains.len()), (real.join("a=b"), 0));
        let link = read(format!("{top}/link=x")).expect("link");
        assert_eq!((link.named, link.real), (real.join("link"), real.clone()));
        for (item, says) in [
            (format!("{top}=x,*"), "remove the others"),
            (format!("{top}=a b"), "not the name of a domain"),
            (format!("{top}/none"), "create it"),
            (format!("{top}/c=d"), "needs a `=` after the name"),
        ] {
            assert!(read(item.clone()).expect_err(&item).contains(says), "{item}");
        }
    }
}
