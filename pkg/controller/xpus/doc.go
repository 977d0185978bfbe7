// SPDX-License-Identifier: Apache-2.0

// Package xpus reconciles XPUs: it keeps a session with the OPI agent of each, finds the node that
// has its card, and creates the XPUs of agents that are pods. [AgentPorts] knows which port an
// agent must have for an XPUPort.
package xpus
