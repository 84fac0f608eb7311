//! What `make dist` packs: the manual pages and completions of every command, the tarball, and the helper of
//! mount(8). `make accept-dist` installs the packages in empty roots.

use fletch_tests::bins::{bin, bin_dir, repo, run, stdout};
use fletch_tests::fixture::is_mounted;
use fletch_tests::require::{Need, have};
use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Output};
use tempfile::TempDir;

fn dir() -> TempDir {
    TempDir::with_prefix("fi-").expect("a directory")
}

/// Returns the names of files and links below a directory.
fn below(dir: &Path) -> BTreeSet<String> {
    let mut find = Command::new("find");
    find.args([".", "!", "-type", "d", "-printf", "%P\n"]).current_dir(dir);
    stdout(&find.output().expect("find")).lines().map(str::to_owned).collect()
}

#[test]
fn every_command_has_a_page_and_every_program_completions() {
    let out = dir();
    run(Command::new(bin("fletch-manuals")).arg(out.path()));
    let files = below(out.path());
    for name in ["fletch.1", "fletch-mount.1", "fletch-jobs-show.1", "fletch-simulate.1"] {
        assert!(files.contains(&format!("man/man1/{name}")), "{name}: {files:?}");
    }
    for name in ["fletch-server.8", "fletch-server-token-new.8", "mount.fletch.8"] {
        assert!(files.contains(&format!("man/man8/{name}")), "{name}: {files:?}");
    }
    for program in ["fletch", "fletch-mount", "fletch-server"] {
        for file in [format!("bash/{program}"), format!("zsh/_{program}"), format!("fish/{program}.fish")] {
            let text = fs::read_to_string(out.path().join("completions").join(&file)).expect(&file);
            assert!(text.contains("token-file") || text.contains("auth-tokens"), "{file}");
        }
    }
    let help = Command::new(bin("fletch")).arg("--help").output().expect("help");
    let page = fs::read_to_string(out.path().join("man/man1/fletch-index.1")).expect("page");
    assert!(page.starts_with(".ie") || page.contains(".TH fletch-index 1"), "{page}");
    assert!(stdout(&help).contains("index"));
}

#[test]
fn the_tarball_is_removed_by_its_own_list() {
    let target = bin_dir().parent().expect("target").to_owned();
    let mut dist = Command::new(repo().join("packaging/dist.sh"));
    let made = dist.arg("tarball").env("CARGO_TARGET_DIR", &target).output().expect("dist.sh");
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let tarball = stdout(&made).lines().last().expect("a path").to_owned();
    let prefix = dir();
    run(Command::new("tar").args(["--strip-components=1", "-xzf", &tarball, "-C"]).arg(prefix.path()));
    let listed = fs::read_to_string(prefix.path().join("share/doc/fletch/files")).expect("the list");
    let listed: BTreeSet<String> = listed.lines().map(str::to_owned).collect();
    assert_eq!(listed, below(prefix.path()));
    for name in
        ["bin/fletch-server", "sbin/mount.fletch", "share/man/man1/fletch.1", "share/fletch/server.toml"]
    {
        assert!(listed.contains(name), "{name}");
    }
    let mut config = Command::new(prefix.path().join("bin/fletch-server"));
    config.args(["--config-check", "--config"]).arg(prefix.path().join("share/fletch/server.toml"));
    let checked = config.output().expect("fletch-server");
    assert!(checked.status.success(), "{}", String::from_utf8_lossy(&checked.stderr));
    let mut remove = Command::new("sh");
    remove.args(["-c", "xargs -d '\\n' rm -f < share/doc/fletch/files"]).current_dir(prefix.path());
    run(&mut remove);
    assert_eq!(below(prefix.path()), BTreeSet::new());
}

/// Calls `mount.fletch` with words of mount(8).
fn helper(at: &Path, words: &[&str]) -> Output {
    Command::new(at).args(words).env_remove("FLETCH_SERVER").output().expect("mount.fletch")
}

#[test]
fn the_helper_of_mount_mounts_and_refuses() {
    if !have(&[Need::Fuse]) {
        return;
    }
    let home = dir();
    let at = home.path().join("mount.fletch");
    symlink(bin("fletch-mount"), &at).expect("symlink");
    let [data, state, mnt] = ["data", "state", "mnt"].map(|name| home.path().join(name));
    fs::create_dir_all(data.join("cat")).expect("mkdir");
    fs::create_dir(&mnt).expect("mkdir");
    fs::write(data.join("cat/1"), b"meow").expect("write");
    let words = |c: &mut Command| {
        c.env("FLETCH_STATE_DIR", &state).env_remove("FLETCH_SERVER");
        run(c);
    };
    words(Command::new(bin("fletch")).args(["index", "--to"]).arg(home.path().join("t")).arg(&data));
    let options = format!(
        "rw,tables={},uri={},state_dir={},nofail,x-systemd.automount",
        home.path().join("t").display(),
        data.display(),
        state.display()
    );
    let dir = mnt.display().to_string();
    let wrong = helper(&at, &["photos", &dir, "-o", "tabels=x"]);
    let said = String::from_utf8_lossy(&wrong.stderr).into_owned();
    assert_eq!(wrong.status.code(), Some(1), "{said}");
    assert!(said.contains("unknown mount option \"tabels\"") && said.contains("tables_memory"), "{said}");
    assert!(helper(&at, &["photos", &dir, "-f", "-o", &options]).status.success(), "-f only checks");
    assert!(!is_mounted(&mnt));
    let done = helper(&at, &["photos", &dir, "-v", "-o", &options]);
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    assert_eq!(fs::read(mnt.join("cat/1")).expect("read"), b"meow");
    run(Command::new("umount").arg(&mnt));
}
