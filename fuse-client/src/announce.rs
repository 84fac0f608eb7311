//! Announces the mount to its server, so that `fletch status` names it by its directory, and so that a server
//! that ends when it is idle stays while the mount lives.

use fletch_api::{
    AnnounceMount,
    mounts::{ANNOUNCE_INTERVAL, DIR_BYTES_MAX},
};
use fletch_client::{Client, ClientError};
use fletch_core::{Kind, MountId, Root};
use nix::unistd::getuid;
use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};
use tokio::{task::spawn_blocking, time::timeout};
use tokio_util::sync::CancellationToken;

use crate::access::KernelCache;
use crate::cli::Settings;
use crate::fs::inode::Ino;
use crate::kernel_mount;
use crate::requests::RequestContext;

/// How long one announcement may take.
const WITHIN: Duration = Duration::from_secs(5);
/// How long the farewell may take: the mount is about to end.
const FORGET_WITHIN: Duration = Duration::from_millis(300);

/// Returns what a mount announces. A directory whose path is too long is cut.
#[must_use]
pub fn announcement(settings: &Settings, root: Root, dir: &Path) -> AnnounceMount {
    let mut text = dir.to_string_lossy().into_owned();
    while text.len() > DIR_BYTES_MAX {
        text.pop();
    }
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    AnnounceMount {
        dataset: settings.target.dataset.clone(),
        root,
        dir: text,
        host: host.trim().to_owned(),
        pid: std::process::id(),
        job: settings.process.job.clone(),
        version: settings.target.version.clone(),
        problem: None,
        reads: None,
    }
}

/// Makes the kernel ask again for the attributes of the mount's root, and of nothing else.
///
/// The kernel caches names and attributes for a day, and opens files without a request. So a mount does not
/// see a program whose files are all in the page cache. After this, the program's next path through the root
/// is one GETATTR. Blocks, but for no page and no request.
pub fn make_use_visible(kernel: &dyn KernelCache) {
    let Some(root) = Ino::ROOT.number() else { return };
    match kernel.forget_attributes(root) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            tracing::debug!(%error, "the kernel keeps the attributes of the root");
        }
        _ => {}
    }
}

/// Announces the mount again and again until `stop`, then tells the server that it ended.
///
/// A server that does not answer, or is older than this, changes nothing for the mount.
pub async fn run(
    client: Client,
    mut mount: AnnounceMount,
    (context, kernel): (Arc<RequestContext>, Arc<dyn KernelCache>),
    dir: PathBuf,
    stop: CancellationToken,
) {
    if !getuid().is_root() {
        drop(spawn_blocking(move || kernel_mount::ask_first(&dir)).await);
    }
    let began = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let Ok(id) = MountId::new(&format!("{}-{}", mount.pid, began.as_nanos())) else { return };
    let client = client.within(WITHIN).fail_fast();
    loop {
        mount.reads = Some(context.reads());
        match client.announce_mount(&id, &mount).await {
            Err(e) if is_unknown(&e) => {
                tracing::debug!(error = %e, "the server does not list mounts");
                return;
            }
            Err(e) => tracing::debug!(error = %e, "the server did not hear of this mount: trying again"),
            Ok(()) => {
                let kernel = Arc::clone(&kernel);
                drop(spawn_blocking(move || make_use_visible(&*kernel)).await);
            }
        }
        if timeout(ANNOUNCE_INTERVAL, stop.cancelled()).await.is_ok() {
            break;
        }
    }
    // A server that does not hear it forgets the mount by itself.
    drop(client.within(FORGET_WITHIN).forget_mount(&id).await);
}

/// Whether the server has no such route.
fn is_unknown(e: &ClientError) -> bool {
    e.kind() == Kind::NotFound
}
