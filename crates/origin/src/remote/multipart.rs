//! Writes local files of any size, in parts and in bounded memory.

use super::translate::{translate, unavailable};
use super::{Current, RemotePrefix};
use crate::OriginError;
use crate::object::PutMode;
use bytes::Bytes;
use object_store::multipart::{MultipartStore, PartId};
use object_store::path::Path as Key;
use std::fs::File;
use std::io::Read as _;
use std::path::Path;
use std::sync::Arc;

/// The length of a part, in bytes. Longer parts are used for files that would need more than [`PARTS_MAX`].
const PART_BYTES: u64 = 16 << 20;
const PARTS_MAX: u64 = 9_000;

fn uploads<'a>(at: &'a Current, what: &str) -> Result<&'a dyn MultipartStore, OriginError> {
    at.store.uploads().ok_or_else(|| OriginError::invalid(what, "the store does not support writes in parts"))
}

impl RemotePrefix {
    pub async fn put_file(
        &self,
        what: &str,
        path: &str,
        file: &Path,
        mode: PutMode,
    ) -> Result<u64, OriginError> {
        self.writable(what)?;
        let shown = file.display().to_string();
        let opened = crate::regular_file::open_regular(file).map_err(|e| OriginError::io(&shown, &e))?;
        let (file, length) = (Arc::new(opened.0), opened.1.len());
        if length <= PART_BYTES {
            let bytes = part(&shown, &file, length).await?;
            self.put(what, path, bytes, mode).await?;
            return Ok(length);
        }
        if mode == PutMode::Create {
            match self.head(what, path).await {
                Ok(_) => return Err(OriginError::AlreadyExists { what: what.to_owned() }),
                Err(OriginError::NotFound { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        let key = &self.key(what, path)?;
        let id = self
            .remote
            .retried(what, 0, |_, at| async move {
                uploads(&at, what)?.create_multipart(key).await.map_err(|e| translate(what, &e))
            })
            .await?;
        let id = &id;
        let sent = self.parts(what, key, id, &shown, &file, length).await;
        if sent.is_err() {
            let remote = &self.remote;
            let aborted = remote
                .retried(what, 0, |_, at| async move {
                    remote.with_patience(what, uploads(&at, what)?.abort_multipart(key, id)).await
                })
                .await;
            if let Err(error) = aborted {
                tracing::warn!(%error, "could not abort an upload; its parts stay at the store");
            }
        }
        sent.map(|()| length)
    }

    async fn parts(
        &self,
        what: &str,
        key: &Key,
        id: &String,
        shown: &str,
        file: &Arc<File>,
        length: u64,
    ) -> Result<(), OriginError> {
        let step = PART_BYTES.max(length.div_ceil(PARTS_MAX));
        let mut ids: Vec<PartId> = Vec::new();
        for (index, start) in (0..length).step_by(usize::try_from(step).unwrap_or(usize::MAX)).enumerate() {
            let bytes = &part(shown, file, step.min(length - start)).await?;
            let put = |_, at: Arc<Current>| async move {
                let put = uploads(&at, what)?.put_part(key, id, index, bytes.clone().into()).await;
                put.map_err(|e| translate(what, &e))
            };
            ids.push(self.remote.retried(what, bytes.len() as u64, put).await?);
        }
        let ids = &ids;
        let complete = |_, at: Arc<Current>| async move {
            let done = uploads(&at, what)?.complete_multipart(key, id, ids.clone()).await;
            done.map(|_| ()).map_err(|e| translate(what, &e))
        };
        self.remote.retried(what, 0, complete).await
    }
}

/// Reads the next `length` bytes of `file`.
async fn part(shown: &str, file: &Arc<File>, length: u64) -> Result<Bytes, OriginError> {
    let file = Arc::clone(file);
    let read = tokio::task::spawn_blocking(move || {
        let mut bytes = Vec::with_capacity(usize::try_from(length).unwrap_or_default());
        (&*file).take(length).read_to_end(&mut bytes)?;
        if (bytes.len() as u64) < length {
            return Err(std::io::Error::other("the file became shorter while it was written to the origin"));
        }
        Ok(Bytes::from(bytes))
    });
    let read = read.await.map_err(|e| unavailable(shown, &e.to_string()))?;
    read.map_err(|e| OriginError::io(shown, &e))
}
