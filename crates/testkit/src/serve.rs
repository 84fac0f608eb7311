//! One HTTP/1.1 server on a loopback port, with a runtime of its own, so that synchronous tests
//! can use it and a blocked test runtime does not stop it.

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
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// A body whose error closes the connection in the middle of it.
pub(crate) type Body = UnsyncBoxBody<Bytes, io::Error>;

/// The error of a body that ends before its time. It waits a little, because hyper drops what it
/// has not yet written when a body fails, and what was to pass shall pass.
pub(crate) async fn broken(why: &str) -> io::Error {
    tokio::time::sleep(Duration::from_millis(20)).await;
    io::Error::other(why)
}

/// The server; dropping it closes the port and every connection.
pub(crate) struct Server {
    pub address: SocketAddr,
    stop: CancellationToken,
    runtime: Option<Runtime>,
}

impl Server {
    /// Serves `connection` for each accepted stream.
    pub fn start<F, Fut>(connection: F) -> Server
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
            let listener = TcpListener::from_std(listener).expect("a listener of the runtime");
            let tasks = TaskTracker::new();
            loop {
                let stream = tokio::select! {
                    () = stopped.cancelled() => return,
                    accepted = listener.accept() => match accepted {
                        Ok((stream, _)) => stream,
                        // Out of descriptors, or the peer left: the next one may do better.
                        Err(_) => continue,
                    },
                };
                // Without it every small answer waits 40 ms for the peer's delayed ack.
                if stream.set_nodelay(true).is_err() {
                    continue;
                }
                let ended = stopped.clone();
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
            // Not the plain drop, which must not happen inside another runtime.
            runtime.shutdown_background();
        }
    }
}

/// Answers the requests of one connection. `None` means: never answer.
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
    // A connection that breaks is what tests of faults are about; the client sees it.
    let _ = hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
}
