//! Writes and removals of one object.

use super::translate::{translate, unavailable};
use super::{Current, Reach};
use crate::OriginError;
use crate::origin::PutMode;
use bytes::Bytes;
use object_store::path::Path as Key;
use object_store::{ObjectStoreExt as _, PutOptions};
use tokio::time::timeout;

impl Reach {
    pub async fn put(&self, what: &str, path: &str, bytes: Bytes, mode: PutMode) -> Result<(), OriginError> {
        self.writable(what)?;
        if mode == PutMode::Create && !self.creates(what).await? {
            return self.create_if_absent(what, path, bytes).await;
        }
        self.send(what, path, bytes, mode).await
    }

    pub(super) async fn send(
        &self,
        what: &str,
        path: &str,
        bytes: Bytes,
        mode: PutMode,
    ) -> Result<(), OriginError> {
        let key = &self.key(what, path)?;
        let bytes = &bytes;
        self.remote
            .tried(what, bytes.len() as u64, |attempt, at| async move {
                self.put_once(&at, what, path, key, bytes, mode, attempt).await
            })
            .await
    }

    pub(super) fn writable(&self, what: &str) -> Result<(), OriginError> {
        match self.remote.scheme.is_plain() {
            true => Err(OriginError::invalid(
                what,
                "a plain HTTP server is only read; name another place for what is written (--to URI)",
            )),
            false => Ok(()),
        }
    }

    #[expect(clippy::too_many_arguments, reason = "the parts of one request, each used once")]
    async fn put_once(
        &self,
        at: &Current,
        what: &str,
        path: &str,
        key: &Key,
        bytes: &Bytes,
        mode: PutMode,
        attempt: u32,
    ) -> Result<(), OriginError> {
        let mode_there = match mode {
            PutMode::Create => object_store::PutMode::Create,
            PutMode::Overwrite => object_store::PutMode::Overwrite,
        };
        let options = PutOptions { mode: mode_there, ..PutOptions::default() };
        let put = at.store.objects().put_opts(key, bytes.clone().into(), options);
        // Half of the time there is: an answer that is lost leaves time to ask again.
        let put = match timeout(self.remote.limits.io_timeout / 2, put).await {
            Ok(put) => put.map_err(|e| translate(what, &e)),
            Err(_) => Err(unavailable(what, "no answer to a write in half of io_timeout")),
        };
        match put {
            Ok(_) => Ok(()),
            Err(OriginError::AlreadyExists { .. } | OriginError::Changed { .. })
                if mode == PutMode::Create =>
            {
                // An earlier attempt of ours may have arrived although its answer did not.
                let there = self.get_once(at, what, path, key, None, None);
                let ours = attempt > 1 && there.await?.bytes == *bytes;
                if ours { Ok(()) } else { Err(OriginError::AlreadyExists { what: what.to_owned() }) }
            }
            Err(error) => Err(error),
        }
    }

    pub async fn delete(&self, what: &str, path: &str) -> Result<(), OriginError> {
        self.writable(what)?;
        let key = &self.key(what, path)?;
        let remote = &self.remote;
        let deleted =
            remote
                .tried(what, 0, |_, at| async move {
                    remote.patiently(what, at.store.objects().delete(key)).await
                })
                .await;
        match deleted {
            Err(OriginError::NotFound { .. }) => Ok(()),
            other => other,
        }
    }
}
