//! Counts the files of a tree during a long run, so that the progress display can say how much is left.
//!
//! Only the display uses the count. The count gives up on a very deep tree rather than use much memory.

use super::walk::WalkOptions;
use crate::progress::Total;
use std::fs::{self, ReadDir};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// The most directories open at once. A deeper tree is not counted.
const DEPTH_MAX: usize = 200;

/// Counts regular files and their bytes. Sets `total` only to a complete count.
pub fn count(tree: &WalkOptions, total: &Total, ended: &AtomicBool) {
    let mut stack: Vec<(ReadDir, PathBuf)> = Vec::new();
    let Ok(top) = fs::read_dir(&tree.base) else { return };
    let device = |path: &Path| fs::metadata(path).ok().map(|m| m.dev());
    let top_device = tree.one_file_system.then(|| device(&tree.base)).flatten();
    stack.push((top, PathBuf::new()));
    let (mut files, mut bytes) = (0, 0);
    while let Some((dir, rel)) = stack.last_mut() {
        if ended.load(Relaxed) {
            return;
        }
        let Some(item) = dir.next() else {
            stack.pop();
            continue;
        };
        let Ok(item) = item else { continue };
        let Ok(kind) = item.file_type() else { continue };
        if kind.is_dir() {
            let rel = rel.join(item.file_name());
            if rel.to_str().is_some_and(|r| tree.exclude.contains(r)) {
                continue;
            }
            if stack.len() == DEPTH_MAX {
                return;
            }
            if top_device.is_some_and(|top| device(&item.path()) != Some(top)) {
                continue;
            }
            if let Ok(dir) = fs::read_dir(item.path()) {
                stack.push((dir, rel));
            }
        } else if kind.is_file() {
            files += 1;
            bytes += item.metadata().map_or(0, |m| m.len());
        }
    }
    total.bytes.store(bytes, Relaxed);
    total.files.store(files, Relaxed);
}
