//! TLS of a client: the files, how changed ones take effect, and what a failure means in plain words.
//!
//! ```text
//! a call, at most once a second ─▶ reads the files ─▶ other contents ─▶ a new reqwest client
//!                                                                        └─ fault: the old one stays
//! ```
//! 1. No key is logged or shown.
//! 2. A call does not wait for a disk that does not answer.
//! 3. Running requests end on the connections on which they began.

use crate::ClientError;
use fletch_core::Hash;
use fletch_host::files::read_small;
use parking_lot::{Mutex, RwLock};
use reqwest::{Certificate, ClientBuilder, Identity};
use std::{
    error::Error as StdError,
    fmt, io,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};
use tokio_rustls::rustls::{self, AlertDescription, CertificateError};

/// How often the files are read again.
const CHECK_EVERY: Duration = Duration::from_secs(1);
/// How long a call waits for the files.
const CHECK_WAIT: Duration = Duration::from_millis(200);

/// The files for TLS. They may be replaced while the client lives.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TlsOptions {
    /// The CAs that may have signed the server's certificate, in PEM form. `None`: those of the system.
    pub ca_file: Option<PathBuf>,
    /// The certificate of this client in PEM form, if the server requires one.
    pub cert_file: Option<PathBuf>,
    /// The key of that certificate in PEM form.
    pub key_file: Option<PathBuf>,
}

/// The contents of the files.
struct Contents {
    ca: Option<Vec<u8>>,
    /// The certificate and the key, one after the other.
    identity: Option<Vec<u8>>,
}

impl Contents {
    /// Returns a value that differs for other contents.
    fn fingerprint(&self) -> Hash {
        let part = |bytes: &Option<Vec<u8>>| bytes.as_ref().map(|b| Hash::of(b).to_string());
        Hash::of(format!("{:?}", [part(&self.ca), part(&self.identity)]).as_bytes())
    }
}

impl TlsOptions {
    /// Whether no file is named.
    fn is_empty(&self) -> bool {
        *self == TlsOptions::default()
    }

    /// Returns the same files by their absolute paths: a daemon has another working directory.
    ///
    /// # Errors
    /// The working directory is unknown.
    pub fn absolute(self) -> io::Result<Self> {
        let absolute = |path: Option<PathBuf>| path.map(std::path::absolute).transpose();
        Ok(TlsOptions {
            ca_file: absolute(self.ca_file)?,
            cert_file: absolute(self.cert_file)?,
            key_file: absolute(self.key_file)?,
        })
    }

    fn read(&self) -> Result<Contents, ClientError> {
        let ca = self.ca_file.as_deref().map(|path| read("CA file", path)).transpose()?;
        let identity = match (&self.cert_file, &self.key_file) {
            (Some(cert), Some(key)) => {
                let cert = read("certificate file", cert)?;
                Some([&cert[..], b"\n", &read("key file", key)?].concat())
            }
            (None, None) => None,
            (Some(_), None) => return Err(half("certificate", "key", "--key-file")),
            (None, Some(_)) => return Err(half("key", "certificate", "--cert-file")),
        };
        Ok(Contents { ca, identity })
    }

    /// Returns the settings with the contents of the files.
    fn apply(&self, contents: &Contents, http: ClientBuilder) -> Result<ClientBuilder, ClientError> {
        let shown = |path: &Option<PathBuf>| path.as_deref().unwrap_or(Path::new("")).display().to_string();
        let mut http = http;
        if let Some(ca) = &contents.ca {
            let file = shown(&self.ca_file);
            let all = Certificate::from_pem_bundle(ca);
            let all = all.map_err(|e| ClientError::Config(format!("CA file {file}: {}", root_cause(&e))))?;
            if all.is_empty() {
                return Err(ClientError::Config(format!("CA file {file}: no certificate in PEM form")));
            }
            http = http.tls_certs_only(all);
        }
        if let Some(identity) = &contents.identity {
            let identity = Identity::from_pem(identity).map_err(|e| {
                let (cert, key) = (shown(&self.cert_file), shown(&self.key_file));
                let why = root_cause(&e);
                ClientError::Config(format!("certificate file {cert} and key file {key}: {why}"))
            })?;
            http = http.identity(identity);
        }
        Ok(http)
    }
}

fn half(given: &str, missing: &str, flag: &str) -> ClientError {
    ClientError::Config(format!("the client {given} needs its {missing}: give {flag}, too"))
}

fn read(what: &str, path: &Path) -> Result<Vec<u8>, ClientError> {
    read_small(path).map_err(|e| ClientError::Config(format!("{what} {}: {e}", path.display())))
}

/// Returns the text of the innermost error.
fn root_cause(e: &dyn StdError) -> String {
    let mut cause = e;
    while let Some(source) = cause.source() {
        cause = source;
    }
    cause.to_string()
}

/// Returns the settings of a reqwest client without the files of TLS.
pub type Settings = Box<dyn Fn() -> ClientBuilder + Send + Sync>;

/// A reqwest client that is made anew when its files change.
pub struct HttpClient {
    files: TlsOptions,
    settings: Settings,
    current: RwLock<reqwest::Client>,
    /// The contents that were read last, in force or not.
    seen: Mutex<Option<Hash>>,
    began: Instant,
    /// When the files are read next, in milliseconds from `began`.
    due_ms: AtomicU64,
    /// Whether the files are being read.
    reading: AtomicBool,
}

impl fmt::Debug for HttpClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HttpClient").field("files", &self.files).finish_non_exhaustive()
    }
}

impl HttpClient {
    /// Reads the files, and makes the client.
    ///
    /// # Errors
    /// [`ClientError::Config`]: a file cannot be used.
    pub fn new(files: TlsOptions, settings: Settings) -> Result<Arc<Self>, ClientError> {
        let contents = files.read()?;
        let client = build(files.apply(&contents, settings())?)?;
        Ok(Arc::new(HttpClient {
            files,
            settings,
            current: RwLock::new(client),
            seen: Mutex::new(Some(contents.fingerprint())),
            began: Instant::now(),
            due_ms: AtomicU64::new(millis(CHECK_EVERY)),
            reading: AtomicBool::new(false),
        }))
    }

    /// Returns the client in use. Call [`HttpClient::refresh`] before.
    pub fn current(&self) -> reqwest::Client {
        self.current.read().clone()
    }

    /// Reads the files again if they were last read a second ago, or at once with `now`.
    pub async fn refresh(self: &Arc<Self>, now: bool) {
        if self.files.is_empty() {
            return;
        }
        let elapsed = millis(self.began.elapsed());
        let due = self.due_ms.load(Relaxed);
        if elapsed < due && !now || self.reading.swap(true, Relaxed) {
            return;
        }
        self.due_ms.store(elapsed + millis(CHECK_EVERY), Relaxed);
        let this = Arc::clone(self);
        let read = tokio::task::spawn_blocking(move || {
            this.reload();
            this.reading.store(false, Relaxed);
        });
        // Files on a disk that does not answer take effect later, or never.
        drop(tokio::time::timeout(CHECK_WAIT, read).await);
    }

    /// Makes the client anew if the contents of the files changed. Blocking.
    fn reload(&self) {
        let mut seen = self.seen.lock();
        let made = self.files.read().map(|contents| (contents.fingerprint(), contents));
        let now = made.as_ref().ok().map(|(fingerprint, _)| *fingerprint);
        if now == *seen {
            return;
        }
        *seen = now;
        let made = made.and_then(|(_, contents)| build(self.files.apply(&contents, (self.settings)())?));
        match made {
            Ok(client) => {
                *self.current.write() = client;
                tracing::info!("the changed files of TLS are in use for new connections");
            }
            Err(error) => {
                tracing::warn!(
                    %error,
                    "the changed files of TLS have a fault; the previous ones stay in use"
                );
            }
        }
    }
}

fn millis(span: Duration) -> u64 {
    u64::try_from(span.as_millis()).unwrap_or(u64::MAX / 2)
}

fn build(http: ClientBuilder) -> Result<reqwest::Client, ClientError> {
    http.build().map_err(|e| ClientError::Config(format!("TLS cannot be set up: {}", root_cause(&e))))
}

/// Why no TLS connection comes about.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsFault {
    what: String,
    advice: &'static str,
}

impl fmt::Display for TlsFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)
    }
}

const ADVICE_CA: &str = "give the certificate of its CA with --ca-file FILE (FLETCH_CA_FILE)";
const ADVICE_NAME: &str =
    "use one of those names in the server's URL, or give the server a certificate with this name";
const ADVICE_DATES: &str = "renew the server's certificate, or correct the clock of this machine";
const ADVICE_CLIENT: &str = "give a valid certificate of a CA that the server knows, and its key: \
    --cert-file (FLETCH_CERT_FILE) and --key-file (FLETCH_KEY_FILE)";
const ADVICE_NO_TLS: &str = "correct the port, or use http:// if that server has no TLS";
const ADVICE_TLS: &str = "use https:// in the server's URL";
const ADVICE_OTHER: &str = "check the server's URL and its certificate";

impl TlsFault {
    /// Returns what a failed request says of TLS, if TLS is at fault. `server` is the address that was asked.
    pub fn of(server: &str, e: &reqwest::Error) -> Option<Self> {
        let mut next: Option<&(dyn StdError + 'static)> = Some(e);
        while let Some(error) = next {
            if let Some(tls) = error.downcast_ref::<rustls::Error>() {
                return Some(Self::explain(server, tls));
            }
            // An `io::Error` does not name the error inside it as its source.
            let inside = error.downcast_ref::<io::Error>().and_then(io::Error::get_ref);
            next = inside.map(|inside| inside as _).or_else(|| error.source());
        }
        None
    }

    /// Returns the fault of a plain request to a port that speaks TLS.
    pub(crate) fn wanted(server: &str) -> Self {
        TlsFault { what: format!("{server} speaks TLS, and was asked by plain HTTP"), advice: ADVICE_TLS }
    }

    fn explain(server: &str, e: &rustls::Error) -> Self {
        let (what, advice) = match e {
            rustls::Error::InvalidCertificate(why) => return Self::of_certificate(server, why),
            rustls::Error::InvalidMessage(_) => (format!("{server} does not speak TLS"), ADVICE_NO_TLS),
            rustls::Error::AlertReceived(AlertDescription::CertificateRequired) => {
                (format!("{server} requires a client certificate"), ADVICE_CLIENT)
            }
            rustls::Error::AlertReceived(
                alert @ (AlertDescription::BadCertificate
                | AlertDescription::UnsupportedCertificate
                | AlertDescription::CertificateRevoked
                | AlertDescription::CertificateExpired
                | AlertDescription::CertificateUnknown
                | AlertDescription::UnknownCA
                | AlertDescription::AccessDenied
                | AlertDescription::DecryptError),
            ) => (format!("{server} rejects the certificate of this client: {alert:?}"), ADVICE_CLIENT),
            e => (format!("no TLS connection to {server}: {e}"), ADVICE_OTHER),
        };
        TlsFault { what, advice }
    }

    fn of_certificate(server: &str, why: &CertificateError) -> Self {
        let of = |what: &str| format!("the certificate of {server} {what}");
        let (what, advice) = match why {
            CertificateError::UnknownIssuer => (of("is not signed by a known CA"), ADVICE_CA),
            CertificateError::NotValidForName => (of("is for another name"), ADVICE_NAME),
            CertificateError::NotValidForNameContext { presented, .. } => {
                (of(&format!("is for other names ({})", presented.join(", "))), ADVICE_NAME)
            }
            CertificateError::Expired | CertificateError::ExpiredContext { .. } => {
                (of("has expired"), ADVICE_DATES)
            }
            CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
                (of("is not valid yet"), ADVICE_DATES)
            }
            // webpki has no word of its own for it.
            why if format!("{why:?}").contains("CaUsedAsEndEntity") => (
                of("is that of a CA and not of a server"),
                "give the server a certificate that its CA signed",
            ),
            why => (of(&format!("cannot be trusted: {why}")), ADVICE_OTHER),
        };
        TlsFault { what, advice }
    }

    /// Returns what to do.
    pub(crate) fn advice(&self) -> &'static str {
        self.advice
    }
}
