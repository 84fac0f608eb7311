//! An HTTP/1.1 server on a loopback port, with its own runtime.
//!
//! So a synchronous test can use it, and a test that blocks its own runtime does not stop it.

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::combinators::UnsyncBoxBody;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use std::convert::Infallible;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Runtime;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// A response body. Its error closes the connection before the body is complete.
pub(crate) type Body = UnsyncBoxBody<Bytes, io::Error>;

/// Returns the error that ends a body early, after a short wait.
///
/// When a body fails, hyper drops the bytes that it has not written yet. The wait lets it write them.
pub(crate) async fn cut_off(why: &str) -> io::Error {
    tokio::time::sleep(Duration::from_millis(20)).await;
    io::Error::other(why)
}

/// A running server. Dropping it closes the port and every connection.
pub(crate) struct Server {
    pub address: SocketAddr,
    stop: CancellationToken,
    runtime: Option<Runtime>,
}

impl Server {
    /// Starts a server that calls `connection` for each accepted stream.
    pub fn start<F, Fut>(connection: F) -> Server
    where
        F: Fn(TcpStream) -> Fut + Send + 'static,
        Fut: Future<Output = ()> + Send + 'static,
    {
        Self::start_with(watch::channel(true).1, connection)
    }

    /// Starts a server that listens, and keeps its connections, while `open` is true.
    pub fn start_with<F, Fut>(mut open: watch::Receiver<bool>, connection: F) -> Server
    where
        F: Fn(TcpStream) -> Fut + Send + 'static,
        Fut: Future<Output = ()> + Send + 'static,
    {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .thread_name("testkit")
            .enable_all()
            .build()
            .expect("a runtime for the test server");
        let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a loopback port");
        listener.set_nonblocking(true).expect("a non-blocking listener");
        let address = listener.local_addr().expect("the port's address");
        let stop = CancellationToken::new();
        let stopped = stop.clone();
        runtime.spawn(async move {
            let mut listener = Some(TcpListener::from_std(listener).expect("a listener of the runtime"));
            let mut connections = stopped.child_token();
            let tasks = TaskTracker::new();
            loop {
                if !*open.borrow_and_update() {
                    drop(listener.take());
                    connections.cancel();
                    connections = stopped.child_token();
                    tokio::select! {
                        () = stopped.cancelled() => return,
                        Ok(()) = open.changed() => {},
                        else => return,
                    }
                    continue;
                }
                let listening = match listener.take() {
                    Some(listening) => listening,
                    None => match TcpListener::bind(address).await {
                        Ok(listening) => listening,
                        // A connection of the closed port may end a little later.
                        Err(_) => {
                            tokio::time::sleep(Duration::from_millis(5)).await;
                            continue;
                        }
                    },
                };
                let stream = tokio::select! {
                    () = stopped.cancelled() => return,
                    Ok(()) = open.changed() => None,
                    accepted = listening.accept() => match accepted {
                        Ok((stream, _)) => Some(stream),
                        // No descriptor is free, or the peer left. The next connection may succeed.
                        Err(_) => None,
                    },
                };
                listener = Some(listening);
                // Otherwise each small response waits 40 ms for the peer's delayed ack.
                let Some(stream) = stream.filter(|stream| stream.set_nodelay(true).is_ok()) else { continue };
                let ended = connections.clone();
                let serving = connection(stream);
                tasks.spawn(async move {
                    tokio::select! { () = ended.cancelled() => {}, () = serving => {} }
                });
            }
        });
        Server { address, stop, runtime: Some(runtime) }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.cancel();
        if let Some(runtime) = self.runtime.take() {
            // A plain drop panics inside another runtime.
            runtime.shutdown_background();
        }
    }
}

/// Answers the requests of one connection with `answer`; `None` leaves a request without an answer.
pub(crate) async fn requests<F, Fut>(stream: TcpStream, answer: Arc<F>)
where
    F: Fn(Request<Incoming>) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = Option<Response<Body>>> + Send,
{
    let service = service_fn(move |request| {
        let answer = Arc::clone(&answer);
        async move {
            match answer(request).await {
                Some(response) => Ok::<_, Infallible>(response),
                None => std::future::pending().await,
            }
        }
    });
    // Tests of faults break connections on purpose; the client sees the error.
    let _ = hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
}
