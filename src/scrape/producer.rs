//! Turns a future that sends items into a stream of them, without a task of its own.

use futures_util::FutureExt;
use futures_util::stream::{Stream, poll_fn};
use tokio::sync::mpsc::{Sender, channel};

/// Streams the items that `produce` sends, and its error last. Polling the stream drives the future: a send
/// waits for the next poll, and fails only when the stream is dropped together with the future.
pub(super) fn stream<T, E, F: Future<Output = Result<(), E>>>(
    produce: impl FnOnce(Sender<Result<T, E>>) -> F,
) -> impl Stream<Item = Result<T, E>> {
    let (sender, mut items) = channel(1);
    let producing = produce(sender.clone());
    let with_error = async move {
        if let Err(error) = producing.await {
            let _ = sender.send(Err(error)).await;
        }
    };
    let mut producer = Box::pin(with_error.fuse());
    poll_fn(move |context| {
        let _ = producer.poll_unpin(context);
        items.poll_recv(context)
    })
}
