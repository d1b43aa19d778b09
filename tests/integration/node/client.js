// Sends, receives, streams and settles messages; prints what it got as JSON.
// Usage: node client.js ADDRESS PROTO_ROOT
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");

const [address, root] = process.argv.slice(2);
const definition = loader.loadSync("postroom/adapters/grpc/v1/mailbox.proto", {
  includeDirs: [root],
  keepCase: true,
  longs: Number,
  oneofs: true,
});
const { Mailbox } = grpc.loadPackageDefinition(definition).postroom.v1;
const mailbox = new Mailbox(address, grpc.credentials.createInsecure());
const deadline = () => new Date(Date.now() + 30_000);

function call(method, request) {
  return new Promise((resolve, reject) => {
    mailbox[method](request, { deadline: deadline() }, (error, response) =>
      error ? reject(error) : resolve(response),
    );
  });
}

function firstDelivery(request) {
  return new Promise((resolve, reject) => {
    const stream = mailbox.recvStream(request, { deadline: deadline() });
    stream.on("error", reject);
    stream.on("data", async ({ item, delivery }) => {
      if (item !== "delivery") return;
      const [message] = delivery.messages;
      await call("ack", { receipts: [message.receipt] });
      stream.removeAllListeners("error");
      stream.on("error", () => {}); // CANCELLED, as we end it
      stream.cancel();
      resolve(message);
    });
  });
}

async function main() {
  const attrs = { tenant: Buffer.from("acme") };
  const message = { topic: "orders", payload: Buffer.from("from Node"), attrs, idem_key: "node-1" };
  const sent = await call("send", { message });
  const again = await call("send", { message });
  const { messages } = await call("recv", { topics: ["orders"], wait_ms: 10_000 });
  const acked = await call("ack", { receipts: messages.map(({ receipt }) => receipt) });
  await call("send", { message: { topic: "streamed", payload: Buffer.from("a stream") } });
  const streamed = await firstDelivery({ topics: ["streamed"] });
  const refused = await call("send", { message: { topic: "no spaces" } }).catch((error) => error);
  const backlog = await call("backlog", {});
  console.log(
    JSON.stringify({
      sent,
      again,
      received: messages.map(({ message_id, envelope }) => ({
        message_id,
        payload: envelope.payload.value.toString(),
        tenant: envelope.extensions.tenant.toString(),
      })),
      settled: acked.results.map(({ error }) => error),
      streamed: streamed.envelope.payload.value.toString(),
      refused: { code: grpc.status[refused.code], details: refused.details },
      unsettled: (backlog.shards || []).length,
    }),
  );
  mailbox.close();
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
