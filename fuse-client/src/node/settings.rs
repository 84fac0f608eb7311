//! The settings of the node store: flags, environment variables and the settings file.

use anyhow::{Context, Result, bail};
use clap::Args;
use fletch_client::{Servers, TokenSource};
use fletch_core::Hash;
use fletch_settings::{Amount, ByteSize};
use serde::Deserialize;
use std::path::PathBuf;

/// The keys of the settings file that belong to the node store.
pub const KEYS: &[&str] = &["cache.dir", "cache.size", "cache.free_floor"];
/// The smallest size of a node store, in bytes.
pub const CACHE_BYTES_MIN: u64 = 16 << 20;
/// The default space that stays free on the file system.
const FREE_FLOOR: Amount = Amount::Percent(5);

/// The heading of these flags in the help.
const CACHE: &str = "Cache on this node";

/// The flags of the node store.
#[derive(Debug, Clone, Default, Args)]
pub struct CacheFlags {
    /// Keep chunks on disk: a size or a part of the free space
    /// [default: 0]
    #[arg(
        long,
        env = "FLETCH_CACHE_SIZE",
        value_name = "SIZE|PERCENT",
        hide_env = true,
        help_heading = CACHE
    )]
    pub cache_size: Option<Amount>,
    /// Directory for them [default: /var/cache/fletch, or ~/.cache/fletch]
    #[arg(long, env = "FLETCH_CACHE_DIR", value_name = "DIR", hide_env = true, help_heading = CACHE)]
    pub cache_dir: Option<PathBuf>,
    /// Space that the cache leaves free on that file system [default: 5%]
    #[arg(
        long,
        env = "FLETCH_CACHE_FREE_FLOOR",
        value_name = "SIZE|PERCENT",
        hide_env = true,
        help_heading = CACHE
    )]
    pub cache_free_floor: Option<Amount>,
}

/// The `[cache]` table of the settings file.
#[derive(Debug, Default, Deserialize)]
pub struct CacheFile {
    dir: Option<PathBuf>,
    size: Option<Amount>,
    free_floor: Option<Amount>,
    /// The disk for tables.
    pub tables: Option<ByteSize>,
}

/// The settings of a node store that this mount takes part in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CacheSettings {
    /// The cache directory, which holds all stores; absolute.
    pub dir: PathBuf,
    /// The most space of this store: bytes, or a part of the free space of its file system.
    pub size: Amount,
    /// The space that stays free on the file system: bytes, or a part of its total space.
    pub free_floor: Amount,
    /// The name of the store: a hash of server and principal. I7: stores with different names share nothing.
    pub name: Hash,
    /// The directory that remembers where cache directories lie; `None` if this user has no state directory.
    pub records: Option<PathBuf>,
    /// The server or tables that the name was made for. A rotated token gives another name in the same scope.
    pub scope: String,
}

impl CacheFlags {
    /// Returns the cache directory, absolute; `None` if this user has none.
    ///
    /// # Errors
    /// The directory is relative, and there is no current directory.
    pub fn dir(&self, file: &CacheFile) -> Result<Option<PathBuf>> {
        let default = || fletch_settings::cache_dir(nix::unistd::geteuid().is_root());
        let dir = self.cache_dir.clone().or_else(|| file.dir.clone()).or_else(default);
        let absolute =
            |dir: PathBuf| std::path::absolute(&dir).with_context(|| format!("path {}", dir.display()));
        dir.map(absolute).transpose()
    }

    /// Returns the settings, or `None` if no size is given. `from` is the URI of the tables of a mount
    /// without server.
    ///
    /// # Errors
    /// A usage error: which setting is wrong, and what to give instead.
    pub fn into_settings(
        self,
        file: CacheFile,
        server: Option<&Servers>,
        from: Option<&str>,
        token: Option<&TokenSource>,
    ) -> Result<Option<CacheSettings>> {
        let size = self.cache_size.or(file.size).unwrap_or(Amount::Bytes(0));
        match size {
            Amount::Bytes(0) | Amount::Percent(0) => return Ok(None),
            Amount::Bytes(n) if n < CACHE_BYTES_MIN => {
                bail!("--cache-size {size} is too small: give at least 16MiB, or 0 for no cache on disk")
            }
            _ => {}
        }
        let dir = self.dir(&file)?;
        let dir = dir.context("no cache directory: XDG_CACHE_HOME and HOME are not set; give --cache-dir")?;
        let scope = match (server, from) {
            (Some(server), _) => format!("server {server}"),
            (None, from) => format!("tables {}", from.unwrap_or_default()),
        };
        let name = TokenSource::name_of(token, &scope)?;
        let free_floor = self.cache_free_floor.or(file.free_floor).unwrap_or(FREE_FLOOR);
        Ok(Some(CacheSettings { dir, size, free_floor, name, records: None, scope }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(server: &str, token: Option<&str>) -> Hash {
        let flags = CacheFlags { cache_size: Some(Amount::Bytes(64 << 20)), ..CacheFlags::default() };
        let flags = CacheFlags { cache_dir: Some("/c".into()), ..flags };
        let token = token.map(|t| TokenSource::Text(t.to_owned()));
        let server: Servers = server.parse().expect("endpoint");
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
    fn no_size_means_no_store() {
        let none = |flags: CacheFlags| flags.into_settings(CacheFile::default(), None, None, None);
        assert_eq!(none(CacheFlags::default()).expect("usable"), None);
        let little = CacheFlags { cache_size: Some(Amount::Bytes(1 << 20)), ..CacheFlags::default() };
        assert!(none(little).expect_err("too little").to_string().contains("16MiB"));
    }
}
