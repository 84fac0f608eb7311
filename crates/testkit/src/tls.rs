//! TLS for test servers: the certificate of the folder `tls`, which no other program trusts.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::aws_lc_rs;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};

fn file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tls").join(name)
}

/// Returns the file with the authority that a client has to trust, for example in `SSL_CERT_FILE`.
#[must_use]
pub fn authority() -> PathBuf {
    file("authority.pem")
}

/// Returns the files with the certificate for `localhost`, `127.0.0.1` and `0.0.0.0`, and with its key.
#[must_use]
pub fn server() -> (PathBuf, PathBuf) {
    (file("server.pem"), file("server.key"))
}

/// Returns what accepts TLS connections to `localhost`, `127.0.0.1` and `0.0.0.0`.
pub(crate) fn acceptor() -> TlsAcceptor {
    let certificate = CertificateDer::from_pem_file(file("server.pem")).expect("the certificate");
    let key = PrivateKeyDer::from_pem_file(file("server.key")).expect("its key");
    let provider = Arc::new(aws_lc_rs::default_provider());
    let config = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let config = config.expect("the versions of TLS").with_no_client_auth();
    let config = config.with_single_cert(vec![certificate], key).expect("a key for the certificate");
    TlsAcceptor::from(Arc::new(config))
}
