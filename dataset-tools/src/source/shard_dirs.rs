//! Finds the directories of a dataset that have tar shards.

use super::listing::first_paths;
use super::name_list::NameList;
use super::sampler::directory;
use super::walk::{NAMES_BYTES_MAX, Step, Symlinks, Walk, WalkOptions};
use crate::failure::Failure;
use fletch_core::manifest::tar::shard::is_shard;
use fletch_origin::{OriginUri, Origins};
use std::collections::BTreeSet;
use std::ops::ControlFlow;
use tokio::runtime::Handle;

/// The number of first files whose names decide whether a dataset has tar shards.
const FIRST_FILES: usize = 1000;
/// The number of first files, of a dataset with shards, that are looked at for directories with shards.
const SHARD_FILES_MAX: usize = 100_000;

/// Returns the directories that have a tar shard, if one of the first [`FIRST_FILES`] files, in path order,
/// is one; otherwise none.
///
/// Looks at the first [`SHARD_FILES_MAX`] files, by their names alone. Ignores a directory that cannot be
/// read: the run itself reports it.
///
/// # Errors
/// [`Failure`] when the listing of a store fails.
pub fn shard_directories(
    rt: &Handle,
    origins: &Origins,
    uri: &OriginUri,
    names: Option<&NameList>,
) -> Result<BTreeSet<String>, Failure> {
    let mut found = ShardDirs::default();
    if let Some(names) = names {
        let _all_or_enough = names.names().iter().try_for_each(|name| found.see(name));
        return Ok(found.dirs);
    }
    let Some(dir) = uri.as_local() else {
        let origin = origins.open(uri)?;
        rt.block_on(first_paths(&origin, |path| found.see(path)))?;
        return Ok(found.dirs);
    };
    let options = WalkOptions {
        base: dir.to_owned(),
        symlinks: Symlinks::Keep,
        exclude: BTreeSet::from(["fletch".to_owned()]),
        one_file_system: false,
        names_bytes_max: NAMES_BYTES_MAX,
    };
    let Ok(mut walk) = Walk::new(options, &std::env::temp_dir()) else { return Ok(found.dirs) };
    while let Ok(Some(step)) = walk.next_step() {
        if let Step::File { path, .. } = step
            && found.see(&path).is_break()
        {
            break;
        }
    }
    Ok(found.dirs)
}

/// The directories with shards among the files so far.
#[derive(Default)]
struct ShardDirs {
    files: usize,
    dirs: BTreeSet<String>,
}

impl ShardDirs {
    /// Looks at the next file. Breaks when the files after it do not matter.
    fn see(&mut self, path: &str) -> ControlFlow<()> {
        if is_shard(path) && !self.dirs.contains(directory(path)) {
            self.dirs.insert(directory(path).to_owned());
        }
        self.files += 1;
        let enough = if self.dirs.is_empty() { FIRST_FILES } else { SHARD_FILES_MAX };
        if self.files < enough { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
    }
}
