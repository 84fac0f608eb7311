//! Follows symbolic links inside a version.

use crate::TableError;
use crate::version::{Found, Resolved, Version};
use fletch_core::manifest::EntryKind;
use std::collections::VecDeque;

/// The most links that are followed for one path: the bound of Linux.
const LINKS_MAX: usize = 40;
/// The most components that are looked up for one path, those of the links' targets among them.
const STEPS_MAX: usize = 512;

impl Version {
    /// Returns the file to which the link at `link` leads; `None` if it leads to no file of this version.
    ///
    /// `target` is the link's own target. Targets are resolved as Linux does, component by component, with
    /// the root of the version as a border: an absolute target and one that leaves the version lead nowhere.
    /// So does a chain of more than 40 links.
    ///
    /// # Errors
    /// As [`Version::part`].
    pub async fn follow(&self, link: &str, target: &str) -> Result<Option<Found>, TableError> {
        // The directory in which the next component is looked up.
        let mut dir: Vec<String> = components(link).collect();
        dir.pop();
        let mut rest: VecDeque<String> = components(target).collect();
        if target.starts_with('/') {
            return Ok(None);
        }
        let mut links = 1;
        for _ in 0..STEPS_MAX {
            let Some(component) = rest.pop_front() else { return Ok(None) };
            match component.as_str() {
                "" | "." => continue,
                ".." => {
                    if dir.pop().is_none() {
                        return Ok(None);
                    }
                    continue;
                }
                _ => dir.push(component),
            }
            match self.resolve(&dir.join("/")).await? {
                Some(Resolved::Dir(_)) => {}
                Some(Resolved::Entry(found)) if found.entry().kind == EntryKind::Symlink => {
                    let target = found.entry().target;
                    links += 1;
                    if links > LINKS_MAX || target.starts_with('/') {
                        return Ok(None);
                    }
                    dir.pop();
                    for component in components(target).rev() {
                        rest.push_front(component);
                    }
                }
                // What follows a file, even a slash alone, asks for a directory.
                Some(Resolved::Entry(found)) => return Ok(rest.is_empty().then_some(found)),
                None => return Ok(None),
            }
        }
        Ok(None)
    }
}

fn components(path: &str) -> impl DoubleEndedIterator<Item = String> + '_ {
    path.split('/').map(str::to_owned)
}
