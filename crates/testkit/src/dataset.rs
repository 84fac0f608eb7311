//! Trees of files made from a seed: unique, incompressible, of log-normal sizes.
//!
//! They have the odd names and the links of real trees.

use crate::seeds;
use rand::Rng as _;
use std::fs;
use std::io::{self, BufWriter, Read as _};
use std::os::unix::fs::symlink;
use std::path::Path;

/// File names that software tends to handle wrongly. All are UTF-8.
pub const ODD_NAMES: &[&str] = &[
    "x#1",
    "a b",
    " lead",
    "trail ",
    "é",
    "e\u{301}",
    "a%20b",
    "%",
    "a+b",
    "a?b=c&d",
    "a:b",
    "a\\b",
    "quo\"te'",
    "<&>",
    "日本語",
    "~tilde",
    ".hidden",
    "-dash",
    "a=b",
    "[x]{y}",
    "a*b",
    "z..z",
    "new\nline",
];

/// The content of a tree.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Spec {
    /// The number of regular files with content, without [`Spec::odd_names`].
    pub files: usize,
    /// The median of their sizes, in bytes.
    pub median_bytes: u64,
    /// The standard deviation of the logarithm of their sizes; 0 makes all sizes equal.
    pub sigma: f64,
    /// The largest size of a file, in bytes.
    pub bytes_max: u64,
    /// The number of directories that hold the files.
    pub dirs: usize,
    /// The number of levels of directories, at least 1.
    pub depth: usize,
    /// Whether there is one small file for each of [`ODD_NAMES`].
    pub odd_names: bool,
    /// The number of links: in turn to a file, to a directory, and dangling.
    pub symlinks: usize,
    /// The number of empty directories.
    pub empty_dirs: usize,
    /// The number of files of zero bytes.
    pub empty_files: usize,
}

impl Default for Spec {
    /// 200 files of about 8 KiB, with some of each kind: 2 to 3 MB.
    fn default() -> Self {
        Spec {
            files: 200,
            median_bytes: 8 << 10,
            sigma: 0.8,
            bytes_max: 1 << 20,
            dirs: 12,
            depth: 3,
            odd_names: true,
            symlinks: 6,
            empty_dirs: 3,
            empty_files: 3,
        }
    }
}

/// A tree that was written. Paths are relative; each list is sorted by path bytes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Tree {
    /// Regular files, including the empty ones, with their sizes in bytes.
    pub files: Vec<(String, u64)>,
    /// Links and their targets.
    pub symlinks: Vec<(String, String)>,
    /// Empty directories.
    pub empty_dirs: Vec<String>,
    /// The sum of the files' sizes.
    pub bytes: u64,
}

/// Returns the content of file `index` of the tree of `seed`. No two files share a block.
#[must_use]
pub fn content(seed: u64, index: u64, size: u64) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(size).expect("a file that fits into memory")];
    stream(seed, index).fill(&mut bytes);
    bytes
}

fn stream(seed: u64, index: u64) -> blake3::OutputReader {
    blake3::Hasher::new().update(&seed.to_le_bytes()).update(&index.to_le_bytes()).finalize_xof()
}

/// Creates `dir` and writes the tree of `seed` and `spec` into it. The same arguments give the same tree.
///
/// # Errors
/// The file system's error.
pub fn write_tree(dir: &Path, seed: u64, spec: &Spec) -> io::Result<Tree> {
    let mut rng = seeds::rng(seed);
    let mut tree = Tree::default();
    fs::create_dir_all(dir)?;
    let dirs: Vec<String> = (0..spec.dirs.max(1)).map(|i| directory(i, spec.depth.max(1))).collect();
    for name in &dirs {
        fs::create_dir_all(dir.join(name))?;
    }
    let mut index = 0;
    let mut write = |tree: &mut Tree, path: String, size: u64| -> io::Result<()> {
        let mut file = BufWriter::with_capacity(1 << 20, fs::File::create_new(dir.join(&path))?);
        io::copy(&mut stream(seed, index).take(size), &mut file)?;
        file.into_inner()?;
        index += 1;
        tree.bytes += size;
        tree.files.push((path, size));
        Ok(())
    };
    for i in 0..spec.files {
        let size = spec.median_bytes as f64 * (spec.sigma * seeds::normal(&mut rng)).exp();
        let size = (size as u64).clamp(1, spec.bytes_max.max(1));
        let at = &dirs[rng.random_range(0..dirs.len())];
        write(&mut tree, format!("{at}/{i:07}.bin"), size)?;
    }
    if spec.odd_names {
        for (i, name) in ODD_NAMES.iter().enumerate() {
            write(&mut tree, format!("{}/{name}", dirs[i % dirs.len()]), 100 + i as u64)?;
        }
    }
    for i in 0..spec.empty_files {
        write(&mut tree, format!("{}/empty-{i}", dirs[i % dirs.len()]), 0)?;
    }
    for i in 0..spec.empty_dirs {
        let path = format!("{}/void-{i}", dirs[i % dirs.len()]);
        fs::create_dir(dir.join(&path))?;
        tree.empty_dirs.push(path);
    }
    for i in 0..spec.symlinks {
        let up = "../".repeat(spec.depth.max(1));
        let target = match (i % 3, tree.files.first()) {
            (0, Some((file, _))) => format!("{up}{file}"),
            (1, _) => format!("{up}{}", dirs[0]),
            _ => "nowhere/at all".to_owned(),
        };
        let path = format!("{}/link-{i}", dirs[i % dirs.len()]);
        symlink(&target, dir.join(&path))?;
        tree.symlinks.push((path, target));
    }
    tree.files.sort();
    tree.symlinks.sort();
    tree.empty_dirs.sort();
    Ok(tree)
}

/// Returns the path of directory `i`, `depth` levels deep. Neighbours share ancestors.
fn directory(i: usize, depth: usize) -> String {
    let mut parts: Vec<String> =
        (1..depth).map(|level| format!("d{level}-{}", i / 4_usize.pow(level as u32))).collect();
    parts.reverse();
    parts.push(format!("d0-{i:04}"));
    parts.join("/")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn a_seed_gives_one_tree_with_everything_in_it() {
        let (a, b) = (tempfile::tempdir().expect("tempdir"), tempfile::tempdir().expect("tempdir"));
        let spec = Spec::default();
        let seed = seeds::seed();
        let tree = write_tree(&a.path().join("new"), seed, &spec).expect("written");
        assert_eq!(write_tree(b.path(), seed, &spec).expect("written"), tree);
        assert_eq!(tree.files.len(), spec.files + ODD_NAMES.len() + spec.empty_files);
        assert_eq!((tree.symlinks.len(), tree.empty_dirs.len()), (spec.symlinks, spec.empty_dirs));
        let mut seen = HashSet::new();
        let mut bytes = 0;
        for (path, size) in &tree.files {
            let one = fs::read(a.path().join("new").join(path)).expect(path);
            assert_eq!(one, fs::read(b.path().join(path)).expect(path));
            assert_eq!(one.len() as u64, *size);
            assert!(one.len() < 16 || seen.insert(one[..16].to_vec()), "{path} is not unique");
            bytes += size;
        }
        assert_eq!(bytes, tree.bytes);
        let mut sizes: Vec<u64> = tree.files.iter().map(|f| f.1).filter(|s| *s > 200).collect();
        sizes.sort_unstable();
        let median = sizes[sizes.len() / 2];
        assert!((4 << 10..16 << 10).contains(&median), "median {median}");
        assert_ne!(write_tree(&a.path().join("other"), seed ^ 1, &spec).expect("written").bytes, tree.bytes);
    }

    #[test]
    fn content_is_what_is_in_the_file() {
        let dir = tempfile::tempdir().expect("tempdir");
        let spec = Spec { files: 1, odd_names: false, ..Spec::default() };
        let tree = write_tree(dir.path(), 7, &spec).expect("written");
        let (path, size) = tree.files.iter().find(|f| f.1 > 0).expect("a file");
        assert_eq!(fs::read(dir.path().join(path)).expect("read"), content(7, 0, *size));
    }
}
