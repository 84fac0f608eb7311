//! The mounts of Fletch on this machine: dead ones, and a nightly index that reads living ones.

use super::finding::Finding;
use crate::own_server::{OwnPaths, records};
use fletch_host::mounts::{self, FS_TYPE, Health, MountEntry};
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

pub const DEAD: &str = "dead-mount";
/// The directory in which `fletch-mount --datasets` mounts versions.
const VERSIONS: &str = ".versions";
pub const UPDATEDB: &str = "updatedb";

/// The settings of `updatedb`, which `locate` uses.
const UPDATEDB_CONF: &str = "etc/updatedb.conf";

#[derive(Debug, Clone)]
pub struct Facts {
    dead: Result<Vec<MountEntry>, String>,
    /// The directories that `fletch mount` of this user mounted.
    made: BTreeSet<PathBuf>,
    /// The file systems that `updatedb` leaves out; `None` if it has no settings file.
    pruned: Option<Pruned>,
}

/// The line `PRUNEFS` of the settings of `updatedb`.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Pruned {
    NoLine,
    Types(Vec<String>),
}

impl Facts {
    pub fn gather(root: &Path) -> Self {
        let conf = fs::read_to_string(root.join(UPDATEDB_CONF)).ok();
        Facts {
            dead: fs::read(root.join("proc/self/mountinfo")).map(|t| dead(&t)).map_err(|e| e.to_string()),
            made: made_by_mount(),
            pruned: conf.as_deref().map(pruned),
        }
    }

    pub fn findings(&self) -> Vec<Finding> {
        let mut found = match &self.dead {
            Ok(dead) => dead.iter().map(|mount| dead_finding(mount, &self.made)).collect(),
            Err(why) => vec![Finding::warning(
                DEAD,
                format!("the mount table cannot be read: {why}"),
                "mount /proc: mount -t proc proc /proc",
            )],
        };
        found.extend(self.pruned.as_ref().and_then(updatedb_finding));
        found
    }
}

fn dead(table: &[u8]) -> Vec<MountEntry> {
    let all = mounts::of_fletch_in(table).into_iter();
    all.filter_map(|(mount, health)| (health == Health::Dead).then_some(mount)).collect()
}

/// Returns the directories that `fletch mount` of this user mounted.
fn made_by_mount() -> BTreeSet<PathBuf> {
    let own = OwnPaths::of_process();
    own.map(|own| records::all(&own).into_iter().map(|made| made.dir).collect()).unwrap_or_default()
}

fn dead_finding(mount: &MountEntry, made: &BTreeSet<PathBuf>) -> Finding {
    let (dir, name) = (mount.dir.display(), mount.dataset().unwrap_or("?"));
    let of_all = mount.dir.parent().filter(|above| above.ends_with(VERSIONS)).and_then(Path::parent);
    let call = match of_all {
        Some(all) => format!("fletch-mount --datasets {}", all.display()),
        None if made.contains(&mount.dir) => format!("fletch mount {name} {dir}"),
        None => format!("fletch-mount {name} {dir}"),
    };
    Finding::error(
        DEAD,
        format!("{dir} is a mount of {name} whose fletch-mount is dead: programs there get ENOTCONN"),
        format!("mount again, which replaces it: {call}; or detach it: umount -l {dir}"),
    )
}

fn updatedb_finding(pruned: &Pruned) -> Option<Finding> {
    let fix = match pruned {
        Pruned::Types(types) if types.iter().any(|t| t.eq_ignore_ascii_case(FS_TYPE)) => return None,
        Pruned::Types(_) => format!("as root: sed -i 's/^ *PRUNEFS *= *\"/&{FS_TYPE} /' /{UPDATEDB_CONF}"),
        Pruned::NoLine => format!("as root: echo 'PRUNEFS=\"{FS_TYPE}\"' >> /{UPDATEDB_CONF}"),
    };
    let what =
        format!("updatedb lists every file of every mount: PRUNEFS of /{UPDATEDB_CONF} lacks {FS_TYPE}");
    Some(Finding::warning(UPDATEDB, what, fix))
}

fn pruned(conf: &str) -> Pruned {
    let value = conf.lines().find_map(|line| {
        let (key, value) = line.split_once('=')?;
        (key.trim() == "PRUNEFS").then(|| value.trim().trim_matches('"'))
    });
    value.map_or(Pruned::NoLine, |v| Pruned::Types(v.split_whitespace().map(str::to_owned).collect()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fix_of_updatedb_works() {
        let root = tempfile::tempdir().expect("tempdir");
        let conf = root.path().join(UPDATEDB_CONF);
        let finding = || Facts::gather(root.path()).pruned.as_ref().and_then(updatedb_finding);
        assert_eq!(finding(), None, "no updatedb here");
        fs::create_dir(root.path().join("etc")).expect("mkdir");
        for text in
            ["PRUNE_BIND_MOUNTS=\"yes\"\nPRUNEFS=\"NFS afs fuse.sshfs\"\n", "# PRUNEFS\n", "PRUNEFS = \"\"\n"]
        {
            fs::write(&conf, text).expect("write");
            let found = finding().expect(text);
            let command = found.fix.strip_prefix("as root: ").expect("a command");
            let command = command.replace("/etc/updatedb.conf", &conf.display().to_string());
            let done = std::process::Command::new("sh").args(["-c", &command]).status().expect("sh");
            assert!(done.success(), "{command}");
            assert_eq!(finding(), None, "{}", fs::read_to_string(&conf).expect("conf"));
        }
        let text = fs::read_to_string(&conf).expect("conf");
        assert!(text.starts_with("PRUNEFS = \"fuse.fletch "), "{text}");
    }

    #[test]
    fn a_dead_mount_is_named_with_its_dataset() {
        let mount = MountEntry {
            device: "0:5".into(),
            dir: "/data/m".into(),
            fs_type: FS_TYPE.into(),
            source: "fletch:photos".into(),
        };
        let among_all = MountEntry { dir: "/run/all/.versions/6f1a".into(), ..mount.clone() };
        let none = BTreeSet::new();
        let made = BTreeSet::from([mount.dir.clone()]);
        assert!(dead_finding(&mount, &made).fix.contains("fletch mount photos /data/m; "));
        assert!(dead_finding(&among_all, &none).fix.contains("fletch-mount --datasets /run/all; "));
        let facts = Facts { dead: Ok(vec![mount]), made: none, pruned: None };
        let found = facts.findings();
        assert_eq!(found.len(), 1);
        assert!(found[0].fix.contains("fletch-mount photos /data/m"), "{found:?}");
    }
}
