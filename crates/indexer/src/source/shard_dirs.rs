//! Finds the directories of a dataset whose files are tar shards.

use super::draft::{DraftEntries, entries};
use super::listing::{Listed, ListingError, first_paths};
use super::name_list::NameList;
use super::sampler::directory;
use super::walk::{NAMES_BYTES_MAX, Step, Symlinks, Walk, WalkOptions};
use crate::failure::Failure;
use fletch_core::manifest::tar::shard::is_shard;
use fletch_origin::{OriginUri, Origins};
use futures::TryStreamExt as _;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;
use std::sync::Arc;
use tokio::runtime::Handle;

/// The number of first files whose names decide whether a dataset has tar shards.
const FIRST_FILES: usize = 1000;
/// The number of first files, of a dataset with shards, that are looked at for directories with shards.
const SHARD_FILES_MAX: usize = 100_000;
/// The most bytes of the names of directories that are kept. The files after that are not looked at.
const DIRS_BYTES_MAX: usize = 16 << 20;
/// At most one of so many files of a directory of shards may be a shard: others describe it, such as an
/// index, a table and statistics of each shard. An archive among more files than that is one of them.
const FILES_PER_SHARD_MAX: usize = 4;

/// Returns the directories of tar shards, if one of the first [`FIRST_FILES`] files, in path order, is a
/// shard; otherwise none.
///
/// In a directory of shards at least one of [`FILES_PER_SHARD_MAX`] files is a shard.
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
        return Ok(found.of_shards());
    }
    let Some(dir) = uri.as_local() else {
        let origin = origins.open(uri)?;
        rt.block_on(first_paths(&origin, |path| found.see(path)))?;
        return Ok(found.of_shards());
    };
    let options = WalkOptions {
        base: dir.to_owned(),
        symlinks: Symlinks::Keep,
        exclude: BTreeSet::from(["fletch".to_owned()]),
        one_file_system: false,
        names_bytes_max: NAMES_BYTES_MAX,
    };
    let Ok(mut walk) = Walk::new(options, &std::env::temp_dir()) else { return Ok(found.of_shards()) };
    while let Ok(Some(step)) = walk.next_step() {
        if let Step::File { path, .. } = step
            && found.see(&path).is_break()
        {
            break;
        }
    }
    Ok(found.of_shards())
}

/// Returns the directories of tar shards among the files of a draft, in path order.
///
/// # Errors
/// [`Failure`] when the tables of the draft cannot be read.
pub async fn shard_directories_of_draft(draft: Arc<dyn DraftEntries>) -> Result<BTreeSet<String>, Failure> {
    let (mut found, mut entries) = (ShardDirs::default(), std::pin::pin!(entries(draft)));
    while let Some(listed) = entries.try_next().await.map_err(ListingError::failure)? {
        if let Listed::Object(object) = listed
            && found.see(&object.path).is_break()
        {
            break;
        }
    }
    Ok(found.of_shards())
}

/// The files of each directory so far, and the shards among them.
#[derive(Default)]
struct ShardDirs {
    files: usize,
    shards: usize,
    dirs_bytes: usize,
    dirs: BTreeMap<String, Counts>,
}

#[derive(Default)]
struct Counts {
    files: usize,
    shards: usize,
}

impl ShardDirs {
    /// Looks at the next file. Breaks when the files after it do not matter.
    fn see(&mut self, path: &str) -> ControlFlow<()> {
        let counts = match self.dirs.get_mut(directory(path)) {
            Some(counts) => counts,
            None => {
                self.dirs_bytes += directory(path).len();
                self.dirs.entry(directory(path).to_owned()).or_default()
            }
        };
        let shards = usize::from(is_shard(path));
        counts.files += 1;
        counts.shards += shards;
        self.files += 1;
        self.shards += shards;
        let enough = if self.shards == 0 { FIRST_FILES } else { SHARD_FILES_MAX };
        let has_room = self.dirs_bytes < DIRS_BYTES_MAX;
        if self.files < enough && has_room { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
    }

    /// Returns the directories of shards.
    fn of_shards(self) -> BTreeSet<String> {
        let is_of_shards =
            |counts: &Counts| counts.shards > 0 && counts.files <= counts.shards * FILES_PER_SHARD_MAX;
        self.dirs.into_iter().filter(|(_, counts)| is_of_shards(counts)).map(|(dir, _)| dir).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(paths: &[String]) -> Vec<String> {
        let mut found = ShardDirs::default();
        let _all_or_enough = paths.iter().try_for_each(|path| found.see(path));
        found.of_shards().into_iter().collect()
    }

    fn named(dir: &str, count: usize, extension: &str) -> Vec<String> {
        (0..count).map(|i| format!("{dir}/{i:05}.{extension}")).collect()
    }

    #[test]
    fn shards_with_their_indices_tables_and_a_readme_are_a_directory_of_shards() {
        let mut paths =
            [named("train", 9, "tar"), named("train", 9, "idx"), named("train", 9, "json")].concat();
        paths.push("train/README.md".to_owned());
        assert_eq!(of(&paths), ["train"]);
        assert_eq!(of(&["one.tar".to_owned(), "README.md".to_owned()]), [""]);
    }

    #[test]
    fn the_names_of_directories_have_a_bound() {
        let mut found = ShardDirs::default();
        assert!(found.see("0.tar").is_continue());
        let long = "d".repeat(4000);
        let seen =
            (0..SHARD_FILES_MAX).take_while(|i| found.see(&format!("{long}{i}/x")).is_continue()).count();
        assert!(seen < 5000, "{seen} directories");
        assert_eq!(found.of_shards(), BTreeSet::from([String::new()]));
    }

    #[test]
    fn an_archive_among_images_makes_no_directory_of_shards() {
        let mut paths = named("photos", 900, "jpg");
        paths.push("photos/backup.tar".to_owned());
        assert!(of(&paths).is_empty());
        // A directory of shards beside them is found.
        paths.extend(named("shards", 3, "tar"));
        assert_eq!(of(&paths), ["shards"]);
    }
}
