// Calls the actions that it reads from standard input, one a line as JSON, and prints an answer for each.
// The action Consume is none of SQS: sqs-consumer handles messages of a queue, and fails once.
// Usage: node client.js ADDRESS
const readline = require("node:readline");
const sdk = require("@aws-sdk/client-sqs");
const { Consumer } = require("sqs-consumer");

const sqs = new sdk.SQSClient({
  endpoint: process.argv[2],
  region: "us-east-1",
  credentials: { accessKeyId: "any", secretAccessKey: "any" },
  maxAttempts: 1,
});

function consume({ QueueUrl, Count }) {
  return new Promise((resolve, reject) => {
    const handled = [];
    let hasFailed = false;
    const consumer = Consumer.create({
      queueUrl: QueueUrl,
      sqs,
      waitTimeSeconds: 1,
      visibilityTimeout: 30,
      terminateVisibilityTimeout: true, // what fails is visible again
      handleMessage: async (message) => {
        if (!hasFailed) {
          hasFailed = true;
          throw new Error("fails once");
        }
        handled.push(message.Body);
        if (handled.length === Count) consumer.stop();
        return message;
      },
    });
    consumer.on("error", reject);
    consumer.on("processing_error", () => {});
    consumer.on("stopped", () => resolve({ Handled: handled }));
    consumer.start();
  });
}

async function main() {
  for await (const line of readline.createInterface({ input: process.stdin })) {
    const { action, parameters } = JSON.parse(line);
    try {
      const answer =
        action === "Consume"
          ? await consume(parameters)
          : await sqs.send(new sdk[`${action}Command`](parameters));
      console.log(JSON.stringify({ answer }));
    } catch (error) {
      console.log(JSON.stringify({ code: error.name, text: String(error) }));
    }
  }
}

main();
