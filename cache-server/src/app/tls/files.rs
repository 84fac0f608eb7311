//! Reads the files of `[tls]` and builds the TLS configuration from them.

use fletch_host::files::read_small;
use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
};
use tokio_rustls::rustls::{
    self, RootCertStore, ServerConfig,
    crypto::{CryptoProvider, aws_lc_rs},
    pki_types::{
        CertificateDer, PrivateKeyDer,
        pem::{self, PemObject},
    },
    server::{WebPkiClientVerifier, danger::ClientCertVerifier},
};
use x509_parser::parse_x509_certificate;

/// The protocol that clients may choose. The server speaks no HTTP/2.
const ALPN: &[u8] = b"http/1.1";

/// The settings of the files.
pub const CERT: &str = "tls.cert_file";
pub const KEY: &str = "tls.key_file";
pub const CLIENT_CA: &str = "tls.client_ca_file";

/// The files of `[tls]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsFiles {
    /// The certificate of the server, and those of CAs between it and its root.
    pub cert: PathBuf,
    /// The key of the certificate.
    pub key: PathBuf,
    /// The CAs of client certificates. `None`: the server asks for none.
    pub client_ca: Option<PathBuf>,
}

/// Why the files cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file cannot be read.
    #[error("{setting}: cannot read {}: {error}; check the path and the permissions", path.display())]
    Read {
        /// The setting.
        setting: &'static str,
        /// The file.
        path: PathBuf,
        /// The error of the system.
        error: io::Error,
    },
    /// A file has none of the PEM blocks that it must have.
    #[error("{setting}: {} contains no {what} in PEM form; it must have a block `-----BEGIN {what}-----`",
        path.display())]
    Empty {
        /// The setting.
        setting: &'static str,
        /// The file.
        path: PathBuf,
        /// The name of the block.
        what: &'static str,
    },
    /// A PEM block of a file cannot be used.
    #[error("{setting}: {} cannot be used: {why}", path.display())]
    Unusable {
        /// The setting.
        setting: &'static str,
        /// The file.
        path: PathBuf,
        /// The reason.
        why: String,
    },
    /// The key is not that of the certificate.
    #[error(
        "{KEY}: the key in {} does not belong to the first certificate in {}; give the key of that \
         certificate, and put the server's own certificate first", key.display(), cert.display()
    )]
    Mismatch {
        /// The file of the key.
        key: PathBuf,
        /// The file of the certificate.
        cert: PathBuf,
    },
}

/// What the files contain.
#[derive(Debug)]
pub struct Loaded {
    /// The configuration for connections.
    pub config: ServerConfig,
    /// Since when the certificate is valid, in seconds since 1970.
    pub begins_s: i64,
    /// Until when the certificate is valid, in seconds since 1970.
    pub expires_s: i64,
}

impl TlsFiles {
    /// Reads the files. Blocking.
    ///
    /// # Errors
    /// [`TlsError`].
    pub fn load(&self) -> Result<Loaded, TlsError> {
        let unusable = |setting, path: &Path| {
            let path = path.to_owned();
            move |why: String| TlsError::Unusable { setting, path, why }
        };
        let chain = certificates(CERT, &self.cert)?;
        let (begins_s, expires_s) = dates(&chain[0]).map_err(unusable(CERT, &self.cert))?;
        let key = PrivateKeyDer::from_pem_slice(&read(KEY, &self.key)?).map_err(|e| match e {
            pem::Error::NoItemsFound => {
                TlsError::Empty { setting: KEY, path: self.key.clone(), what: "PRIVATE KEY" }
            }
            e => unusable(KEY, &self.key)(e.to_string()),
        })?;
        let provider = Arc::new(aws_lc_rs::default_provider());
        let clients = self.client_verifier(&provider)?;
        let versions = [&rustls::version::TLS13, &rustls::version::TLS12];
        let config = ServerConfig::builder_with_provider(provider).with_protocol_versions(&versions);
        let config = config.map_err(|e| unusable(CERT, &self.cert)(e.to_string()))?;
        let config = config.with_client_cert_verifier(clients).with_single_cert(chain, key);
        let mut config = config.map_err(|e| match e {
            rustls::Error::InconsistentKeys(_) => {
                TlsError::Mismatch { key: self.key.clone(), cert: self.cert.clone() }
            }
            // The certificate was parsed before, so the key is at fault.
            e => unusable(KEY, &self.key)(e.to_string()),
        })?;
        config.alpn_protocols = vec![ALPN.to_vec()];
        Ok(Loaded { config, begins_s, expires_s })
    }

    /// Returns what checks the certificates of clients. It accepts a client without one (`super` says why).
    fn client_verifier(
        &self,
        provider: &Arc<CryptoProvider>,
    ) -> Result<Arc<dyn ClientCertVerifier>, TlsError> {
        let Some(path) = &self.client_ca else { return Ok(WebPkiClientVerifier::no_client_auth()) };
        let unusable = |why: String| TlsError::Unusable { setting: CLIENT_CA, path: path.clone(), why };
        let mut roots = RootCertStore::empty();
        for certificate in certificates(CLIENT_CA, path)? {
            roots.add(certificate).map_err(|e| unusable(e.to_string()))?;
        }
        let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(provider));
        verifier.allow_unauthenticated().build().map(|v| v as _).map_err(|e| unusable(e.to_string()))
    }
}

/// Returns the bytes of a file.
fn read(setting: &'static str, path: &Path) -> Result<Vec<u8>, TlsError> {
    read_small(path).map_err(|error| TlsError::Read { setting, path: path.to_owned(), error })
}

/// Returns the certificates of a file, at least one.
fn certificates(setting: &'static str, path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let bytes = read(setting, path)?;
    let all: Result<Vec<_>, pem::Error> = CertificateDer::pem_slice_iter(&bytes).collect();
    let all = all.map_err(|e| TlsError::Unusable { setting, path: path.to_owned(), why: e.to_string() })?;
    if all.is_empty() {
        return Err(TlsError::Empty { setting, path: path.to_owned(), what: "CERTIFICATE" });
    }
    Ok(all)
}

/// Returns since when and until when a certificate is valid, in seconds since 1970.
fn dates(certificate: &CertificateDer<'_>) -> Result<(i64, i64), String> {
    let (_, parsed) = parse_x509_certificate(certificate)
        .map_err(|e| format!("its first certificate cannot be parsed: {e}"))?;
    let validity = parsed.validity();
    Ok((validity.not_before.timestamp(), validity.not_after.timestamp()))
}
