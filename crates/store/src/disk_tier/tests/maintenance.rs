//! What an early division of the tier costs.

use super::*;
use crate::{DiskOwner, maintenance};
use futures::future::{BoxFuture, FutureExt as _};
use std::{sync::atomic::AtomicU64, time::Instant as Clock};
use tokio_util::sync::CancellationToken;

/// An owner that wants the tier to be divided all the time.
struct Busy {
    config: DiskConfig,
    divided: AtomicU64,
}

impl DiskOwner for Busy {
    fn config(&self) -> Result<DiskConfig, String> {
        Ok(self.config.clone())
    }

    fn divide(&self, _: &DiskTier) {
        self.divided.fetch_add(1, Relaxed);
    }

    fn wake(&self) -> BoxFuture<'_, ()> {
        tokio::time::sleep(Duration::from_millis(1)).boxed()
    }
}

#[tokio::test]
async fn early_divisions_do_not_make_scrubbing_faster() {
    let dir = tempfile::tempdir().expect("tempdir");
    let tier = DiskTier::new(1 << 20);
    let owner = Arc::new(Busy { config: config(dir.path(), Policy::Fletch), divided: AtomicU64::new(0) });
    maintenance::open(&*owner, &tier).expect("opens");
    for n in 0..48 {
        let chunk = Verified::of(content(n, 1_000_000));
        let key = StoreKey { domain: Domain::default_domain(), hash: chunk.hash() };
        assert_eq!(tier.engine().expect("open").put(&key, D1, &chunk).expect("put"), Stored::Yes);
    }
    let (stop, began) = (CancellationToken::new(), Clock::now());
    let running =
        TaskTracker::new().spawn(maintenance::run(Arc::clone(&owner) as _, Arc::clone(&tier), stop.clone()));
    while owner.divided.load(Relaxed) < 50 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    stop.cancel();
    running.await.expect("ended");
    // 8 MiB and a chunk in each whole round, of which there is one a second.
    let rounds = began.elapsed().as_secs() + 2;
    let scrubbed = tier.engine().expect("open").stats().counts.scrubbed_bytes;
    assert!(scrubbed <= rounds * (9 << 20), "{scrubbed} bytes in {rounds} rounds at most");
    tier.detach("the test ends".to_owned());
}
