//! The options of `fletch doctor`.

use clap::Args;
use fletch_settings::{Amount, ByteSize};
use std::path::PathBuf;

/// `fletch doctor`.
#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// The place of a dataset to read: a directory or a URI.
    pub source: Option<String>,
    /// A place for tables, where one small object is written and deleted.
    #[arg(long, value_name = "URI")]
    pub tables: Option<String>,
    /// The cache directory of the server [default: that of `fletch-server`].
    #[arg(long, value_name = "DIR", env = "FLETCH_CACHE_DIR", hide_env = true)]
    pub cache_dir: Option<PathBuf>,
    /// The size of the cache [default: 50%].
    #[arg(long, value_name = "SIZE|PERCENT", env = "FLETCH_CACHE_SIZE", hide_env = true)]
    pub cache_size: Option<Amount>,
    /// The space that the cache leaves free [default: 5%].
    #[arg(long, value_name = "SIZE|PERCENT", env = "FLETCH_CACHE_FREE_FLOOR", hide_env = true)]
    pub cache_free_floor: Option<Amount>,
    /// The state directory of the server [default: that of `fletch-server`].
    #[arg(long, value_name = "DIR", env = "FLETCH_STATE_DIR", hide_env = true)]
    pub state_dir: Option<PathBuf>,
    /// The memory for chunks of the server [default: half the cgroup's limit, at most 2GiB].
    #[arg(long, value_name = "SIZE", env = "FLETCH_MEMORY", hide_env = true)]
    pub memory: Option<ByteSize>,
    /// The address where the server is to listen, or `none`.
    #[arg(
        long,
        value_name = "IP:PORT",
        env = "FLETCH_LISTEN",
        hide_env = true,
        default_value = "127.0.0.1:7380"
    )]
    pub listen: String,
    /// Demand that other users can read mounts.
    #[arg(long, env = "FLETCH_ALLOW_OTHER", hide_env = true)]
    pub allow_other: bool,
    /// Read /dev, /etc, /proc and /sys below this directory.
    #[arg(long, value_name = "DIR", default_value = "/", hide = true)]
    pub root: PathBuf,
}
