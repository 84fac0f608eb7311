//! What is said about the node's store: flags, environment, file.

use anyhow::{Context, Result, bail};
use clap::Args;
use fletch_client::{Endpoint, TokenSource};
use fletch_core::Hash;
use fletch_settings::Amount;
use serde::Deserialize;
use std::path::PathBuf;

/// Names of the settings file.
pub const KEYS: &[&str] = &["cache.dir", "cache.size", "cache.free_floor"];
/// The smallest store.
pub const CACHE_BYTES_MIN: u64 = 16 << 20;
/// What stays free on the file system unless somebody says otherwise.
const FREE_FLOOR: Amount = Amount::Percent(5);

/// The flags.
#[derive(Debug, Clone, Default, Args)]
pub struct CacheFlags {
    /// Keep chunks on disk: so many bytes at most, or a part of what the file system has to spare. Shared by all
    /// mounts of this node with the same server, token and user [default: 0, none]
    #[arg(long, env = "FLETCH_CACHE_SIZE", value_name = "SIZE|PERCENT")]
    pub cache_size: Option<Amount>,
    /// Where chunks are kept; may vanish at any moment [default: /var/cache/fletch as root, else ~/.cache/fletch]
    #[arg(long, env = "FLETCH_CACHE_DIR", value_name = "DIR")]
    pub cache_dir: Option<PathBuf>,
    /// What always stays free on that file system [default: 5%]
    #[arg(long, env = "FLETCH_CACHE_FREE_FLOOR", value_name = "SIZE|PERCENT")]
    pub cache_free_floor: Option<Amount>,
}

/// The file's section.
#[derive(Debug, Default, Deserialize)]
pub struct CacheFile {
    dir: Option<PathBuf>,
    size: Option<Amount>,
    free_floor: Option<Amount>,
}

/// A store that is to be kept on this node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CacheSettings {
    /// The directory of all stores, absolute.
    pub dir: PathBuf,
    /// What this store may occupy, or a part of what its file system has to spare.
    pub size: Amount,
    /// What stays free on the file system, or a part of all of it.
    pub free_floor: Amount,
    /// Whose it is: the server's and the principal's name. I7: who has another shares nothing.
    pub name: Hash,
    /// What the name was made for: with another token there is another.
    pub scope: String,
}

impl CacheFlags {
    /// Decides. `from` says where chunks come from where there is no server.
    ///
    /// # Errors
    /// What is wrong, all of it usage.
    pub fn into_settings(
        self,
        file: CacheFile,
        server: Option<&Endpoint>,
        from: Option<&str>,
        token: Option<&TokenSource>,
    ) -> Result<Option<CacheSettings>> {
        let size = self.cache_size.or(file.size).unwrap_or(Amount::Bytes(0));
        match size {
            Amount::Bytes(0) | Amount::Percent(0) => return Ok(None),
            Amount::Bytes(n) if n < CACHE_BYTES_MIN => {
                bail!("--cache-size {size} is too little: at least 16MiB, or 0 for no cache on disk")
            }
            _ => {}
        }
        let default = || fletch_settings::cache_dir(nix::unistd::geteuid().is_root());
        let dir = self.cache_dir.or(file.dir).or_else(default);
        let dir = dir.context("neither XDG_CACHE_HOME nor HOME is set: give --cache-dir")?;
        let dir = std::path::absolute(&dir).with_context(|| format!("path {}", dir.display()))?;
        let scope = match (server, from) {
            (Some(server), _) => format!("server {server}"),
            (None, from) => format!("tables {}", from.unwrap_or_default()),
        };
        let name = TokenSource::name_of(token, &scope)?;
        let free_floor = self.cache_free_floor.or(file.free_floor).unwrap_or(FREE_FLOOR);
        Ok(Some(CacheSettings { dir, size, free_floor, name, scope }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(server: &str, token: Option<&str>) -> Hash {
        let flags = CacheFlags { cache_size: Some(Amount::Bytes(64 << 20)), ..CacheFlags::default() };
        let flags = CacheFlags { cache_dir: Some("/c".into()), ..flags };
        let token = token.map(|t| TokenSource::Text(t.to_owned()));
        let server: Endpoint = server.parse().expect("endpoint");
        let settled = flags.into_settings(CacheFile::default(), Some(&server), None, token.as_ref());
        settled.expect("usable").expect("a store").name
    }

    #[test]
    fn i7_another_server_or_token_is_another_store() {
        let (a, b) = ("http://127.0.0.1:1", "http://127.0.0.1:2");
        assert_eq!(of(a, Some("x")), of(a, Some("x")));
        let all = [of(a, None), of(b, None), of(a, Some("x")), of(a, Some("y")), of(b, Some("x"))];
        for (i, one) in all.iter().enumerate() {
            assert!(!all[..i].contains(one));
        }
        assert!(
            !of(a, Some("x")).to_string().contains(&Hash::of(b"x").to_string()),
            "not the server's own hash"
        );
    }

    #[test]
    fn there_is_none_unless_it_is_asked_for() {
        let none = |flags: CacheFlags| flags.into_settings(CacheFile::default(), None, None, None);
        assert_eq!(none(CacheFlags::default()).expect("usable"), None);
        let little = CacheFlags { cache_size: Some(Amount::Bytes(1 << 20)), ..CacheFlags::default() };
        assert!(none(little).expect_err("too little").to_string().contains("16MiB"));
    }
}
