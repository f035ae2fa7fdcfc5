{{- /* Written by `python -m vgpu.chart` from vgpu/config.py and vgpu/chart.py: change it there. */ -}}
{{- define "vgpu.sections" -}}
- path: []
  single:
    resourceName: nvidia.com/gpu
    resourceMem: nvidia.com/gpumem
    resourceMemPercentage: nvidia.com/gpumem-percentage
    resourceCores: nvidia.com/gpucores
    resourcePriority: nvidia.com/priority
    schedulerName: vgpu-scheduler
    corePolicy: fixed
    simulate: ''
    nameOverride: ''
    fullnameOverride: ''
  rest:
    imagePullSecrets: []
    otherReleases: []
- path:
  - global
  single:
    gpuHookPath: /usr/local
    imageRegistry: ''
    controlPlanes: false
  rest: {}
- path:
  - scheduler
  single:
    defaultMem: 0
    defaultCores: 0
    nodePolicy: spread
    gpuPolicy: spread
    privileged: deny
    visibleDevices: deny
    foreignScheduler: deny
    reconcileSeconds: 300
    replicas: 2
    failurePolicy: Fail
    hostNetwork: false
    priorityClassName: system-cluster-critical
  rest:
    resources:
      requests:
        cpu: 100m
        memory: 128Mi
    nodeSelector: {}
    affinity: {}
    tolerations: []
    podAnnotations: {}
    updateStrategy: {}
- path:
  - scheduler
  - ports
  single:
    webhook: 9443
    metrics: 9395
    health: 9397
    extender: 9390
    kubeScheduler: 10259
  rest: {}
- path:
  - scheduler
  - kubeScheduler
  single: {}
  rest:
    resources:
      requests:
        cpu: 50m
        memory: 64Mi
- path:
  - scheduler
  - kubeScheduler
  - image
  single:
    registry: registry.k8s.io
    repository: kube-scheduler
    tag: ''
    digest: ''
    pullPolicy: IfNotPresent
  rest: {}
- path:
  - scheduler
  - certManager
  single:
    enabled: false
  rest:
    issuerRef: {}
- path:
  - scheduler
  - service
  single:
    type: NodePort
  rest:
    monitorPort: 31993
- path:
  - devicePlugin
  single:
    deviceSplitCount: 10
    deviceMemoryScaling: 1.0
    hostMemory: 0
    memoryMode: static
    deviceCoreScaling: 1.0
    migStrategy: none
    disablecorelimit: false
    fillsOn: sms
    copiesOn: engine
    deviceListStrategy: auto
    driverRoot: /
    kubeletRoot: /var/lib/kubelet
    runtimeSocket: ''
    recoverySeconds: 300
    backstop: warn
    bypass: report
    allowDisableControl: false
    runtimeClassName: ''
    priorityClassName: system-node-critical
    cleanUp: true
  rest:
    deviceMemoryScalingByModel: {}
    nodeOverrides: {}
    ignoredXids:
    - 13
    - 31
    - 43
    - 45
    - 68
    resources:
      requests:
        cpu: 50m
        memory: 96Mi
    nodeSelector: {}
    affinity: {}
    tolerations:
    - operator: Exists
    podAnnotations: {}
    updateStrategy:
      type: RollingUpdate
      rollingUpdate:
        maxUnavailable: 10%
- path:
  - devicePlugin
  - service
  single:
    type: NodePort
  rest:
    httpPort: 31992
- path:
  - image
  single:
    registry: ''
    repository: vgpu
    tag: ''
    digest: ''
    pullPolicy: IfNotPresent
  rest: {}
- path:
  - networkPolicy
  single:
    enabled: true
  rest: {}
- path:
  - monitoring
  single:
    podMonitor: false
    prometheusRule: false
    interval: 15s
  rest:
    labels: {}
{{- end -}}
