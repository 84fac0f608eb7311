//! TLS of the TCP listener: reads certificate, key and client CAs, and follows changes of their files.
//!
//! Invariants:
//! 1. Files with a fault change nothing: the previous certificate stays in force. The fault is logged once
//!    for each state of the files.
//! 2. No key is logged or shown.
//! 3. A connection without a client certificate is accepted even where one is required: kubelets send none,
//!    and their probes need an answer. Every other request of such a connection is refused (ADR 64).

mod files;

pub use files::{TlsError, TlsFiles};

use files::Loaded;
use fletch_host::files::FileStamp;
use parking_lot::{Mutex, RwLock};
use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{SystemTime, UNIX_EPOCH},
};
use tokio_rustls::{TlsAcceptor, rustls::ServerConfig};

/// A certificate that ends within this time is worth a warning, in seconds.
const EXPIRES_SOON_S: i64 = 7 * 24 * 3600;

/// What TLS counted since the start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TlsStats {
    /// Changed files with a fault.
    pub reload_errors: u64,
    /// When the certificate in force expires, in seconds since 1970.
    pub expires_s: u64,
}

/// The TLS of a server.
#[derive(Debug)]
pub struct Tls {
    files: TlsFiles,
    active: RwLock<Active>,
    /// The states of the files at the last check. `None` for a file that could not be read.
    last_stamps: Mutex<[Option<FileStamp>; 3]>,
    reload_errors: AtomicU64,
}

/// What is in force.
#[derive(Debug, Clone)]
struct Active {
    config: Arc<ServerConfig>,
    expires_s: i64,
}

impl From<Loaded> for Active {
    fn from(loaded: Loaded) -> Self {
        Active { config: Arc::new(loaded.config), expires_s: loaded.expires_s }
    }
}

impl Tls {
    /// Reads the files. Blocking. An expired certificate is a warning in the log.
    ///
    /// # Errors
    /// [`TlsError`], which names the file and the reason.
    pub fn open(files: TlsFiles) -> Result<Self, TlsError> {
        // Stamped before they are read, so that the next check notices a change in between.
        let stamps = stamps(&files);
        let loaded = files.load()?;
        warn_of_dates(&files, &loaded);
        Ok(Tls {
            files,
            active: RwLock::new(loaded.into()),
            last_stamps: Mutex::new(stamps),
            reload_errors: AtomicU64::new(0),
        })
    }

    /// Whether requests need a client certificate.
    #[must_use]
    pub fn needs_client_certificate(&self) -> bool {
        self.files.client_ca.is_some()
    }

    /// Returns what makes TLS connections, with the certificate in force.
    #[must_use]
    pub fn acceptor(&self) -> TlsAcceptor {
        TlsAcceptor::from(self.active().config)
    }

    fn active(&self) -> Active {
        self.active.read().clone()
    }

    /// Reads the files again if one of them changed. Blocking.
    ///
    /// A second call while one runs does nothing. Open connections keep the certificate of their handshake.
    pub fn reload(&self) {
        let Some(mut seen) = self.last_stamps.try_lock() else { return };
        let stamps = stamps(&self.files);
        if stamps == *seen {
            return;
        }
        *seen = stamps;
        match self.files.load() {
            Ok(loaded) => {
                warn_of_dates(&self.files, &loaded);
                tracing::info!(
                    file = %self.files.cert.display(), expires_s = loaded.expires_s,
                    "the changed TLS certificate is in force for new connections"
                );
                *self.active.write() = loaded.into();
            }
            Err(error) => {
                self.reload_errors.fetch_add(1, Relaxed);
                tracing::error!(
                    %error,
                    "the changed TLS files have a fault; the previous certificate stays in force"
                );
            }
        }
    }

    /// Returns what was counted.
    #[must_use]
    pub fn stats(&self) -> TlsStats {
        TlsStats {
            reload_errors: self.reload_errors.load(Relaxed),
            expires_s: u64::try_from(self.active().expires_s).unwrap_or(0),
        }
    }
}

fn stamps(files: &TlsFiles) -> [Option<FileStamp>; 3] {
    let [cert, key] = [&files.cert, &files.key].map(|path| FileStamp::at(path).ok());
    [cert, key, files.client_ca.as_ref().and_then(|path| FileStamp::at(path).ok())]
}

/// Logs a certificate that is not valid now, or that expires soon.
fn warn_of_dates(files: &TlsFiles, loaded: &Loaded) {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    let now = i64::try_from(now).unwrap_or(i64::MAX);
    let why = if loaded.expires_s < now {
        "has expired, so clients refuse it; renew it"
    } else if loaded.begins_s > now {
        "is not valid yet, so clients refuse it; check the clock of this machine"
    } else if loaded.expires_s - now < EXPIRES_SOON_S {
        "expires within 7 days; renew it"
    } else {
        return;
    };
    tracing::warn!(
        file = %files.cert.display(), expires_s = loaded.expires_s,
        "the TLS certificate {why}"
    );
}

#[cfg(test)]
mod tests;
