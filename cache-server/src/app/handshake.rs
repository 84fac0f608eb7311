//! The handshake of TLS, within the bounds of a connection.
//!
//! ```text
//! waiting: no buffer ──first byte──▶ a TLS record ─▶ takes memory ─▶ handshake ─▶ `connection`
//!                         ├────────▶ plain HTTP   ─▶ 400, closed
//!                         └────────▶ another byte ─▶ closed
//! ```
//! The time from the accept to the end of the first request is bounded as without TLS. So a silent peer, or
//! one that sends garbage, is closed within `limits.head_timeout`. Until its first byte it holds no memory.

use super::{
    App,
    accept::{PeerStream, Wire},
    probe_lane::STAY_MAX,
};
use crate::tenancy::connections::{Closed, Connection, TLS_SEND_BYTES};
use fletch_api::SPEAKS_TLS;
use std::{io, sync::Arc};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    time::{Instant, timeout, timeout_at},
};
use tokio_rustls::{rustls::ServerConnection, server::TlsStream};
use tokio_util::either::Either;

/// The first byte of a TLS connection: the type of a record with a handshake.
const HANDSHAKE_RECORD: u8 = 0x16;
/// The bytes of a plain request that are read before its answer. Unread bytes at the close may reset it.
const PLAIN_BYTES_MAX: usize = 8 << 10;

/// What the first byte of a connection begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Beginning {
    Tls,
    /// A method of HTTP.
    Plain,
    Other,
}

impl Beginning {
    fn of(byte: u8) -> Self {
        match byte {
            HANDSHAKE_RECORD => Beginning::Tls,
            b'A'..=b'Z' => Beginning::Plain,
            _ => Beginning::Other,
        }
    }
}

impl App {
    /// Returns the stream of a connection that is served, after its handshake if the port speaks TLS.
    ///
    /// Takes the memory of a TLS connection. Returns `None` if the connection ended or was answered.
    pub(super) async fn open(
        self: &Arc<Self>,
        wire: Wire,
        connection: &Arc<Connection>,
        until: Instant,
    ) -> Option<PeerStream> {
        let (Wire::Left(tcp), true) = (&wire, self.server.tls.is_some()) else {
            return Some(Either::Left(wire));
        };
        let first = tokio::select! {
            () = connection.closed() => return None,
            () = self.drain.cancelled() => return None,
            first = timeout_at(until, peek(tcp)) => first,
        };
        match first {
            Ok(Ok(Some(Beginning::Tls))) => {}
            // `secure` answers or closes it.
            Ok(Ok(Some(_))) => return self.secure(wire, connection, until).await,
            Ok(_) => return None,
            Err(_) => {
                connection.count_closed(Closed::NotProven);
                return None;
            }
        }
        connection.use_tls();
        if let Err(why) = connection.take_memory().await {
            connection.divert();
            Arc::clone(self).answer_probe(wire, Arc::clone(connection), why).await;
            return None;
        }
        self.secure(wire, connection, until).await
    }

    /// Returns the stream of a connection after its handshake, if the port speaks TLS.
    ///
    /// Answers plain HTTP with 400, and closes what does not complete its handshake in time.
    pub(super) async fn secure(
        self: &Arc<Self>,
        wire: Wire,
        connection: &Connection,
        until: Instant,
    ) -> Option<PeerStream> {
        let (tls, tcp) = match (&self.server.tls, wire) {
            (Some(tls), Wire::Left(tcp)) => (tls, tcp),
            (_, wire) => return Some(Either::Left(wire)),
        };
        let shaken = tokio::select! {
            () = connection.closed() => return None,
            () = self.abort.cancelled() => return None,
            shaken = timeout_at(until, async {
                match peek(&tcp).await? {
                    Some(Beginning::Tls) => {
                        let bound = |c: &mut ServerConnection| c.set_buffer_limit(Some(TLS_SEND_BYTES));
                        tls.acceptor().accept_with(tcp, bound).await.map(Some)
                    }
                    Some(Beginning::Plain) => answer_plain(tcp).await.map(|()| None),
                    Some(Beginning::Other) => Err(io::Error::other("the first byte is neither TLS nor HTTP")),
                    None => Err(io::ErrorKind::UnexpectedEof.into()),
                }
            }) => shaken,
        };
        match shaken {
            Ok(Ok(Some(stream))) => {
                if tls.needs_client_certificate() && !has_certificate(&stream) {
                    connection.set_lacks_certificate();
                }
                Some(Either::Right(Box::new(stream)))
            }
            Ok(Ok(None)) => {
                connection.count_closed(Closed::Handshake);
                None
            }
            Ok(Err(e)) => {
                tracing::debug!(error = %e, source = %connection.source(), "a TLS handshake failed");
                connection.count_closed(Closed::Handshake);
                None
            }
            Err(_) => {
                connection.count_closed(Closed::NotProven);
                None
            }
        }
    }
}

/// Waits for the first byte, and says what it begins. `None` at the end of the stream. Reads nothing.
async fn peek(tcp: &TcpStream) -> io::Result<Option<Beginning>> {
    let mut byte = [0];
    let n = tcp.peek(&mut byte).await?;
    Ok((n > 0).then(|| Beginning::of(byte[0])))
}

fn has_certificate(stream: &TlsStream<TcpStream>) -> bool {
    stream.get_ref().1.peer_certificates().is_some_and(|chain| !chain.is_empty())
}

/// Answers a plain request on a port that speaks TLS.
async fn answer_plain(mut tcp: TcpStream) -> io::Result<()> {
    let mut head = Vec::with_capacity(PLAIN_BYTES_MAX);
    let whole = async {
        while head.len() < PLAIN_BYTES_MAX && !head.windows(4).any(|w| w == b"\r\n\r\n") {
            if tcp.read_buf(&mut head).await? == 0 {
                break;
            }
        }
        io::Result::Ok(())
    };
    // A head that does not end is answered, too.
    if let Ok(read) = timeout(STAY_MAX, whole).await {
        read?;
    }
    let length = SPEAKS_TLS.len() + 1;
    let answer = format!(
        "HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain\r\ncontent-length: {length}\r\n\
         connection: close\r\n\r\n{SPEAKS_TLS}\n"
    );
    tcp.write_all(answer.as_bytes()).await?;
    tcp.shutdown().await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_byte_tells_tls_from_http() {
        assert_eq!(Beginning::of(0x16), Beginning::Tls);
        assert_eq!(Beginning::of(b'G'), Beginning::Plain);
        for other in [0, 0x15, b'g', b' ', 0xff] {
            assert_eq!(Beginning::of(other), Beginning::Other, "{other}");
        }
    }
}
