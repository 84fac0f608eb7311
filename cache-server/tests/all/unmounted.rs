//! I5: a server whose cache is unmounted goes on, and uses the cache again when it is back.

use crate::common::{Node, Tree, body};
use fletch_api::routes;
use fletch_core::Root;
use reqwest::StatusCode;
use std::{
    fs,
    path::Path,
    process::Command,
    time::{Duration, Instant},
};

fn run(command: &str, args: &[&str]) -> Result<(), String> {
    let out = Command::new(command).args(args).output().map_err(|e| format!("{command}: {e}"))?;
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    if out.status.success() { Ok(()) } else { Err(format!("{command} {args:?}: {said}")) }
}

/// A file system that is mounted twice: for good at `held`, and at `mnt` as the test wants.
struct Disk(tempfile::TempDir);

impl Disk {
    fn new() -> Result<Self, String> {
        let disk = Disk(tempfile::tempdir().expect("tempdir"));
        for name in ["held", "mnt"] {
            fs::create_dir(disk.0.path().join(name)).expect("mkdir");
        }
        run("mount", &["-t", "tmpfs", "-o", "size=256m", "tmpfs", &disk.path("held")])?;
        disk.mount();
        Ok(disk)
    }

    fn path(&self, name: &str) -> String {
        self.0.path().join(name).display().to_string()
    }

    fn mount(&self) {
        run("mount", &["--bind", &self.path("held"), &self.path("mnt")]).expect("mounts");
    }

    fn unmount(&self) {
        run("umount", &["--lazy", &self.path("mnt")]).expect("unmounts");
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        for name in ["mnt", "held"] {
            // Not mounted is fine, too.
            drop(run("umount", &["--lazy", &self.path(name)]));
        }
    }
}

async fn read_all(node: &Node, tree: &Tree, root: Root) {
    for (path, bytes) in &tree.files {
        let r = node.get(&routes::file(root, path)).send().await.expect("answer");
        assert_eq!(&body(r, StatusCode::OK).await, bytes, "{path}");
    }
}

#[tokio::test]
async fn i5_a_cache_that_is_unmounted_is_absent_until_it_is_back_and_nothing_is_put_in_its_place() {
    let disk = match Disk::new() {
        Ok(disk) => disk,
        Err(why) => {
            let required = std::env::var("FLETCH_TEST_REQUIRE").unwrap_or_default();
            assert!(!required.split(',').any(|w| w == "root"), "required: root: {why}");
            eprintln!("SKIPPED: needs root: {why}");
            return;
        }
    };
    let tree = Tree::usual();
    let root = tree.index().root();
    let cache = format!("--cache-dir={}", disk.path("mnt/cache"));
    let args = [&*cache, "--cache-size=64MiB", "--cache-free-floor=0"];
    let node = Node::serving(&tree, &args).await;
    node.disk_is("on").await;
    read_all(&node, &tree, root).await;
    // A reply does not wait for the append of its chunk.
    let until = Instant::now() + Duration::from_secs(60);
    while node.metric("fletch_disk_chunks").await == 0 {
        assert!(Instant::now() < until, "nothing is on the disk");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let is_empty = || fs::read_dir(disk.path("mnt")).expect("the directory").next().is_none();
    disk.unmount();
    node.disk_is("absent").await;
    read_all(&node, &tree, root).await;
    assert!(is_empty(), "nothing on the file system below");
    disk.mount();
    node.disk_is("on").await;
    let chunks = node.metric("fletch_disk_chunks").await;
    assert!(chunks > 0, "the chunks are back");
    // The same over a restart.
    let Node { state, running, .. } = node;
    running.shutdown().await;
    disk.unmount();
    let node = Node::start_in(state, &args).await;
    node.disk_is("absent").await;
    read_all(&node, &tree, root).await;
    assert!(is_empty() && !Path::new(&disk.path("mnt/cache")).exists());
    disk.mount();
    node.disk_is("on").await;
    assert!(node.metric("fletch_disk_chunks").await >= chunks, "and stay");
    node.running.shutdown().await;
}
